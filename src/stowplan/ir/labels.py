"""Labels: the tensors and ops of a captured step as its author knows them, by module and line.

A captured graph names tensors after the ATen ops that make them (`addmm_2`). People look for the module that
ran the op and for its line. Graphs of other sources keep the names of their files.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from stowplan.ir.graph import Graph, Kind, Op, Phase, Tensor
from stowplan.units import format_bytes

_KINDS = frozenset(map(str, Kind))
_NAMED = (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT, Kind.CONSTANT)


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of one shape that the same op makes in repeated blocks; or a single tensor."""

    names: tuple[str, ...]
    nbytes: int  # of all of them
    module: str  # that makes them, such as layers.0..11.mlp.act; or the name of a parameter
    what: str  # the ATen op that makes them, or the kind of tensor
    shape: str
    line: str  # empty if it is not known, or no op of the step makes them

    @property
    def details(self) -> str:
        """The op, the shape and the line; a single tensor has its id, by which `explain` finds it."""
        made = self.names[0] if len(self.names) == 1 and self.what not in _KINDS else self.what
        return ", ".join(filter(None, (made, self.shape, self.line)))


@dataclass(frozen=True, slots=True)
class OpGroup:
    """Ops of one type and line in repeated blocks, and what they take."""

    count: int
    seconds: float
    module: str
    what: str
    line: str


class Labels:
    """Names for the tensors and ops of one graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._ops = {op.id: op for op in graph.ops}
        self._makers = {name: op for op in reversed(graph.ops) for name in op.writes()}
        self.captured = any(op.type.startswith("aten.") and (op.scope or op.source) for op in graph.ops)

    def op(self, name: str, *, with_source: bool = False) -> str:
        """An op with its module and line; in a graph that was not captured, its id alone.

        `with_source` gives the whole path of the file, and the place in a file of another format too.
        """
        told = self.place(name, with_source=with_source)
        return f"{name} ({told})" if told else name

    def place(self, name: str, *, with_source: bool = False) -> str:
        """The module and line of an op, as in `op`."""
        op = self._ops.get(name)
        if op is None:
            return ""
        if op.phase is Phase.UPDATE and "when" in op.attributes:
            return f"{str(op.attributes.get('update')).partition('(')[0]}, {op.attributes['when']}"
        module, _, line = self._place(op) if self.captured else ("", "", "")
        of = "backward of " if op.phase is Phase.BACKWARD and module else ""
        return ", ".join(filter(None, (of + module, self._source(op) if with_source else line)))

    def tensor(self, name: str) -> str:
        """A tensor with its module and line; in a graph that was not captured, its id alone."""
        module, what, line = self._home(self._graph.tensors[name])
        told = ", ".join(filter(None, (module, what, line)))
        return f"{name} ({told})" if self.captured and module != name else name

    def module_of(self, name: str) -> str:
        """The module that makes a tensor of a captured step, or the parameter that it is the gradient of."""
        return self._home(self._graph.tensors[name])[0] if self.captured and name in self._makers else ""

    def line_of(self, name: str) -> str:
        """The line of the user's code that makes a tensor of a captured step, with the whole path."""
        return self._source(self._makers[name]) if self.captured and name in self._makers else ""

    def groups(self, names: Iterable[str]) -> list[TensorGroup]:
        """The tensors, those of repeated blocks together; the groups with the most bytes first."""
        found: dict[tuple[object, ...], list[str]] = {}
        for name in names:
            tensor = self._graph.tensors[name]
            module, *rest = self._home(tensor)
            key = (_pattern(module), *rest, shape_text(tensor)) if self.captured else (name,)
            found.setdefault(key, []).append(name)
        return sorted(map(self._group, found.values()), key=lambda group: -group.nbytes)

    def op_groups(self, seconds: Mapping[str, float]) -> list[OpGroup]:
        """Ops by module, those of repeated blocks together; the groups that take the longest first."""
        found: dict[tuple[object, ...], list[str]] = {}
        for name in seconds:
            module, *rest = self._place(self._ops[name])
            found.setdefault((_pattern(module), *rest), []).append(name)
        groups = []
        for names in found.values():
            module = _merged([self._place(self._ops[name])[0] for name in names])
            total = sum(seconds[name] for name in names)
            groups.append(OpGroup(len(names), total, module, *self._place(self._ops[names[0]])[1:]))
        return sorted(groups, key=lambda group: -group.seconds)

    def largest(self, names: Iterable[str], most: int = 4) -> str:
        """The largest groups of some tensors with their bytes, as a refusal names them."""
        return ", ".join(map(_with_bytes, self.groups(names)[:most]))

    def made_in(self, module: str) -> list[str]:
        """The forward tensors with a storage of their own that a module makes, or modules inside it."""
        return [
            name
            for name, op in self._makers.items()
            if (op.scope == module or op.scope.startswith(f"{module}."))
            and op.phase is Phase.FORWARD
            and self._graph.tensors[name].alias_of is None
        ]

    def modules(self) -> list[str]:
        """The paths of all modules that run ops."""
        return list(dict.fromkeys(op.scope for op in self._graph.ops if op.scope))

    def _group(self, names: list[str]) -> TensorGroup:
        tensors = [self._graph.tensors[name] for name in names]
        _, what, line = self._home(tensors[0])
        module = _merged([self._home(tensor)[0] for tensor in tensors])
        nbytes = sum(tensor.nbytes or 0 for tensor in tensors)
        return TensorGroup(tuple(names), nbytes, module, what, shape_text(tensors[0]), line)

    def _home(self, tensor: Tensor) -> tuple[str, str, str]:
        """The module or name of a tensor; the op that makes its storage, or its kind; the line."""
        if not self.captured:
            return tensor.id, str(tensor.kind), ""
        if tensor.gradient_of and self._graph.tensors[tensor.gradient_of].kind in _NAMED:
            target = self._graph.tensors[tensor.gradient_of]
            return target.name or target.id, str(Kind.GRADIENT), ""
        owner = self._graph.tensors[self._graph.storage_of(tensor.id)]
        maker = self._makers.get(owner.id)
        if maker is None or owner.kind in _NAMED:
            return owner.name or owner.id, str(owner.kind), ""
        return self._place(maker)

    def _place(self, op: Op) -> tuple[str, str, str]:
        """The module that ran an op, or that ran what it differentiates; its ATen name; the line."""
        forward = self._ops.get(op.adjoint_of or op.id, op)
        module = op.scope or forward.scope or f"{self._graph.name}.forward".lstrip(".")
        name = op.type.split(".")[1] if "." in op.type else op.type
        in_backward = op.phase is Phase.BACKWARD and not name.endswith("_backward")
        return module, f"{name} in backward" if in_backward else name, PurePath(self._source(op)).name

    def _source(self, op: Op) -> str:
        return op.source or self._ops.get(op.adjoint_of or op.id, op).source


def _with_bytes(group: TensorGroup) -> str:
    size = format_bytes(group.nbytes)
    if len(group.names) > 1:
        return f"{group.module} {group.what} ({len(group.names)} tensors, {size})"
    return f"{group.names[0]}{f' of {group.module}' if group.module != group.names[0] else ''} ({size})"


def shape_text(tensor: Tensor) -> str:
    """The dtype and the sizes of a tensor."""
    sizes = "?" if tensor.shape is None else "x".join(map(str, tensor.shape)) or "scalar"
    return f"{tensor.dtype or '?'} {sizes}"


def _pattern(path: str) -> tuple[str, ...]:
    """Equal for paths that differ only in the numbers of repeated blocks."""
    return tuple("#" if part.isdecimal() else part for part in path.split("."))


def _merged(paths: list[str]) -> str:
    """Paths of one pattern as one: layers.0..11.mlp."""
    columns = zip(*(path.split(".") for path in paths), strict=True)
    return ".".join(",".join(_runs(dict.fromkeys(column))) for column in columns)


def _runs(parts: Iterable[str]) -> Iterator[str]:
    """Numbers that follow each other as a range; anything else as it is."""
    different = list(parts)
    if len(different) == 1:
        yield different[0]
        return
    numbers = sorted(map(int, different))
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            first, last = numbers[start], numbers[end - 1]
            yield str(first) if first == last else f"{first}..{last}"
            start = end
