"""Presence: what generated code does where the loss uses some outputs of a step, and not all.

Each op of backward stands under the condition that one of the gradients it is made from came in. The sum of
two gradients is the one that is there. Where the plan has one op for gradients of which eager may have some,
zeros stand for those that are missing: so does autograd for parts of a split tensor. For others, such as a
tiled segment with two results, that is eager's gradient within rounding, and a `Meeting` tells of it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from stowplan.capture import Call, Program
from stowplan.capture.paths import NOTHING, Paths, Sources
from stowplan.capture.program import inputs_of
from stowplan.capture.stand_ins import stride_of, torch_dtype
from stowplan.ir import Graph, Op


class Meeting(NamedTuple):
    """An op on gradients of several sources: without all of them, its results are eager's within rounding."""

    place: str
    sources: tuple[Sources, ...]

    def is_exact(self, came: Collection[str]) -> bool:
        """Whether all of the gradients are there, or none."""
        return len({each.isdisjoint(came) for each in self.sources}) < 2


class Presence:
    """Writes conditions around the calls of a backward half; none if a single gradient comes in."""

    def __init__(self, graph: Graph, program: Program, paths: Paths, names: Mapping[str, str]) -> None:
        self._graph, self._names, self._paths = graph, names, paths
        self._incoming = frozenset(name for name in program.tangents if name is not None)
        self._sources: dict[str, Sources] = {}
        if len(self._incoming) > 1:
            calls = ((op.id, program.calls[op.id]) for op in graph.ops)
            self._sources = paths.sources(calls, self._incoming)
        self.meetings: list[Meeting] = []

    def flags(self) -> list[str]:
        """The lines that note which gradients came in."""
        asked = sorted(self._incoming) if self._sources else ()
        return [f"{_flag(self._names[name])} = {self._names[name]} is not None" for name in asked]

    def around(self, op: Op, call: Call, lines: Sequence[str], wanted: Iterable[str]) -> list[str]:
        """The lines of a call, under its condition."""
        read = {name: self._sources[name] for name in inputs_of(call) if name in self._sources}
        made = NOTHING.union(*read.values(), *(self._sources.get(name, NOTHING) for name in op.writes()))
        lacking = {name: sources for name, sources in read.items() if sources != made}
        if op.id in self._paths.sums and lacking:
            return self._sum(op, tuple(inputs_of(call)), lines)
        if lacking and not self._paths.takes_zeros(op.id, call):
            self.meetings.append(
                Meeting(f"{call.target} {op.scope}".strip(), tuple({*lacking.values(), made}))
            )
        lines = [*self.zeros(lacking), *lines]
        names = [self._names[name] for name in wanted]
        return _chosen([(self._condition(made), lines)], names) if made else lines

    def zeros(self, tensors: Iterable[str]) -> list[str]:
        """Lines after which none of these gradients is missing."""
        lines = list[str]()
        for name in tensors:
            if self._condition(self._sources.get(name, NOTHING)):
                tensor, variable = self._graph.tensors[name], self._names[name]
                look = f"{tensor.shape}, {stride_of(tensor)}, {torch_dtype(tensor.dtype)}"
                look = f"{look}, {tensor.device!a}"
                lines += [f"if {variable} is None:", f"    {variable} = zeros({look})"]
        return lines

    def _sum(self, op: Op, operands: tuple[str, ...], lines: Sequence[str]) -> list[str]:
        """What autograd adds up if both gradients are there is the one that is there."""
        (made,) = op.writes()
        stride = stride_of(self._graph.tensors[made])
        one, other = (self._condition(self._sources.get(name, NOTHING)) for name in operands)
        cases = [(" and ".join(filter(None, (one, other))), list(lines))]
        for name, condition in zip(operands, (one, other), strict=True):
            copied = f"{self._names[made]} = copied({self._names[name]}, {stride})"
            cases.append((condition, [copied]))
        if any(stride_of(self._graph.tensors[name]) != stride for name in operands):
            sources = tuple(self._sources.get(name, NOTHING) for name in operands)
            self.meetings.append(Meeting(f"the sum of two gradients in {op.scope or 'backward'}", sources))
        return _chosen(cases, [self._names[made]])

    def _condition(self, sources: Sources) -> str:
        """That one of the sources is there, as an expression; empty if one always is."""
        if not sources or sources == self._incoming:
            return ""
        flags = [_flag(self._names[name]) for name in sorted(sources)]
        return flags[0] if len(flags) == 1 else f"({' or '.join(flags)})"


def _flag(variable: str) -> str:
    return f"came_{variable}"


def _chosen(cases: Iterable[tuple[str, Sequence[str]]], names: Sequence[str]) -> list[str]:
    """The lines of the first case whose condition holds; if none does, the names are None."""
    written, word = list[str](), "if"
    for condition, lines in cases:
        if not condition:
            return [*written, "else:", *map(_indented, lines)] if written else list(lines)
        written += [f"{word} {condition}:", *map(_indented, lines)]
        word = "elif"
    return [*written, "else:", f"    {' = '.join(names)} = None"] if names else written


def _indented(line: str) -> str:
    return f"    {line}"
