"""The steps of a plan as Python that a person can read: one line per op, every free explicit.

The text holds no word of the user's. What the user calls a tensor, and the module and file that an op came
from, stand in tables beside it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import basename
from textwrap import TextWrapper
from types import MappingProxyType
from typing import NamedTuple

from stowplan.analyse.facts import storages_of
from stowplan.capture import Call, Program, Ref
from stowplan.capture.paths import Paths
from stowplan.capture.program import inputs_of
from stowplan.ir import Graph, Op, Phase
from stowplan.ops.effects import UPDATE, Effect, effect_of
from stowplan.ops.table import site_of
from stowplan.plan.problem import updated_buffers
from stowplan.plan.steps import Compute, Free, Load, RecomputeOp, Step, Store
from stowplan.run.step.literals import (
    End,
    Moves,
    Outside,
    Piece,
    ends_of_pieces,
    identifiers_of,
    is_in_backward,
)
from stowplan.run.step.placing import BY_ALLOCATOR, Placing
from stowplan.run.step.presence import Meeting, Presence

_ANY_PATHS = Paths()
_DROPPED = "_"  # takes the outputs of a second run that nobody misses


@dataclass(frozen=True, slots=True)
class Source:
    """Two functions as text, and the tensors, by id, that their arguments and results stand for.

    `forward(primals) -> (outputs, saved)`. `backward(primals, saved, tangents, handed, looks)` is a
    generator: it runs one piece each time it is resumed, and leaves the piece's gradients in the list
    `handed` alone. It shows gradients of outputs that others are made of to the functions `looks`. The
    lists `saved` and `tangents` are emptied, so that backward alone decides how long their tensors live.
    A step that is forward alone has no `backward`.
    Gradients that do not come in are None among the `tangents`, and so are those that only follow from them.
    With transfers, the code calls on a `tier`: `stored_bytes` are the sizes that it asks room for.
    """

    text: str
    names: Mapping[str, str]  # by variable of the text: the parameter, buffer, argument or tensor it holds
    places: Mapping[int, str]  # by line of the text, from 1: the module and the user's line that it came from
    forward_primals: tuple[str, ...]
    backward_primals: tuple[str, ...]
    outputs: tuple[str, ...]
    saved: tuple[str, ...]
    tangents: tuple[str, ...]
    pieces: tuple[Piece, ...]
    stored_bytes: tuple[int, ...]
    updated: tuple[str, ...]  # the buffers that the step changes
    overwritten: frozenset[str] = frozenset()  # of the saved tensors, those that backward writes over
    only_one_backward: str = ""  # why another one may not follow it
    inner: Mapping[int, bool] = field(default_factory=dict)  # outputs that others depend on; whether it shows
    meetings: tuple[Meeting, ...] = ()  # of gradients that may be needed together and come in one by one

    def annotated(self) -> str:
        """The text with its tables as comments, for people. It is never compiled."""
        lines, before = [], ""
        for number, line in enumerate(self.text.splitlines(), start=1):
            place = self.places.get(number, "")
            if place and place != before:
                lines.append(f"    # {_harmless(place)}")
            before = place or before
            lines.append(line)
        told = (f"# {variable}: {_harmless(name)}" for variable, name in self.names.items())
        return "\n".join((*lines, "", *told, ""))


def source_of(
    graph: Graph,
    program: Program,
    steps: Sequence[Step],
    placing: Placing = BY_ALLOCATOR,
    paths: Paths = _ANY_PATHS,
    gradients: Mapping[str, str] = MappingProxyType({}),
) -> Source:
    """The forward half of the steps and the backward half, which begins with the first backward op.

    `gradients` has those of tensors of forward. `placing` writes the calls of ops.
    """
    ops = {op.id: op for op in graph.ops}
    steps = steps[: _end_of_backward(ops, steps)]
    turn = _turn(ops, steps)
    names = identifiers_of(graph, program.calls)
    outputs = tuple(dict.fromkeys(leaf.tensor for leaf in program.outputs if isinstance(leaf, Ref)))
    tangents = tuple(name for name in program.tangents if name is not None)
    draws, moves = _replayed_draws(graph, steps), Moves(names, graph)
    outside, presence = Outside(graph, program, outputs), Presence(graph, program, paths, names)
    writer = _Writer(ops, program.calls, names, draws, moves, outside, placing, presence)
    forward = _Half(writer, steps[:turn])
    forward.give(outputs)
    kept = (*draws.values(), *moves.handles, *placing.begun_with)
    inner = dict(_inner(program, outputs, gradients))
    looked: dict[str, list[int]] = {}
    for position, gradient in inner.items():
        looked.setdefault(gradient, []).append(position)
    ends = ends_of_pieces(graph, program, steps[turn:]) if program.is_differentiated else ()
    backward = _Half(writer, steps[turn:], ends, looked)
    shown = {*tangents, *(name for op in graph.ops for name in op.writes())}
    saved = tuple(name for name in backward.needed if name in forward.made and name not in outputs)
    primals = tuple(name for name in backward.needed if name not in {*saved, *tangents})
    lines = (
        _Line("def forward(primals):"),
        *_unpacking(names, forward.needed, "primals", clear=False),
        *(_Line(f"    {name} = {made}") for name, made in placing.begun_with.items()),
        *forward.lines,
        _Line(f"    return {_tuple(names, outputs)}, [{_list(names, saved, kept)}]"),
    )
    way_back = (
        _Line(""),
        _Line(""),
        _Line("def backward(primals, saved, tangents, handed, looks):"),
        *_unpacking(names, primals, "primals", clear=False),
        *_unpacking(names, saved, "saved", clear=True, further=kept),
        *_unpacking(names, tangents, "tangents", clear=True),
        *(_Line(f"    {line}") for line in presence.flags()),
        *(_Line(f"    {line}") for name in tangents for line in _looks(names[name], looked.get(name, ()))),
        *backward.lines,
    )
    lines += way_back if program.is_differentiated else ()
    return Source(
        "".join(f"{line.text}\n" for line in lines),
        {names[tensor]: called(program, tensor) for tensor in graph.tensors},
        {number: line.place for number, line in enumerate(lines, start=1) if line.place},
        tuple(forward.needed),
        primals,
        outputs,
        saved,
        tangents,
        tuple(backward.pieces),
        stored_bytes=tuple(moves.stored_bytes),
        updated=tuple(sorted(updated_buffers(graph))),
        overwritten=frozenset(_overwritten(graph, steps[turn:], saved)),
        only_one_backward=placing.only_one_backward,
        inner={position: gradient in shown for position, gradient in inner.items()},
        meetings=tuple(presence.meetings),
    )


def _inner(
    program: Program, outputs: Sequence[str], gradients: Mapping[str, str]
) -> Iterator[tuple[int, str]]:
    """The positions of outputs that others are made of, with their gradients; those of no leaf."""
    leaves = list(zip(program.outputs, program.attached, program.tangents, strict=True))
    for position, output in enumerate(outputs):
        own = [tangent for leaf, attached, tangent in leaves if attached and leaf == Ref(output)]
        gradient = gradients.get(output)
        if own and gradient is not None and gradient not in own and output not in program.gradients:
            yield position, gradient


def _looks(gradient: str, positions: Iterable[int]) -> list[str]:
    """The lines that show a gradient to those who look at outputs."""
    return [f"if {position} in looks: looks[{position}]({gradient})" for position in positions]


class _Line(NamedTuple):
    """A line of the text and, beside it, where it came from."""

    text: str
    place: str = ""


def called(program: Program, tensor: str) -> str:
    """The user's name for a tensor."""
    known = program.parameters.get(tensor) or program.buffers.get(tensor) or (tensor,)
    return ", ".join(known)


def _harmless(text: str) -> str:
    """On one line, in characters that steer no terminal and end no comment."""
    return ascii(text)[1:-1]


def _turn(ops: Mapping[str, Op], steps: Sequence[Step]) -> int:
    """The step at which the backward half begins: after the last forward op and the frees that follow it."""
    turn = 0
    for number, step in enumerate(steps):
        if isinstance(step, Compute):
            if ops[step.op].phase is Phase.BACKWARD:
                break
            turn = number + 1
    return turn + (turn < len(steps) and isinstance(steps[turn], Free))


def _end_of_backward(ops: Mapping[str, Op], steps: Sequence[Step]) -> int:
    """Where the updates begin that wait for the optimizer's step, or the end."""
    run = ((number, ops[step.op]) for number, step in enumerate(steps) if isinstance(step, Compute))
    late = (number for number, op in run if op.type == UPDATE and not is_in_backward(op))
    return next(late, len(steps))


def _overwritten(graph: Graph, steps: Iterable[Step], tensors: Iterable[str]) -> Iterator[str]:
    """Those of the tensors in whose storage one of the steps writes a result."""
    number_of = storages_of(graph).number_of
    runs = (step for step in steps if isinstance(step, Compute | RecomputeOp))
    written = {number_of[victim] for step in runs for _, victim in step.overwrites}
    return (name for name in tensors if number_of[name] in written)


def _replayed_draws(graph: Graph, steps: Sequence[Step]) -> dict[str, str]:
    """By op, a variable for the generator's state before each random op that is recomputed."""
    again = {step.op for step in steps if isinstance(step, RecomputeOp)}
    random = [op.id for op in graph.ops if op.id in again and effect_of(site_of(graph, op)) & Effect.RANDOM]
    return {op: f"draws{number}" for number, op in enumerate(random)}


@dataclass(frozen=True, slots=True)
class _Writer:
    """The writer of both halves."""

    ops: Mapping[str, Op]
    calls: Mapping[str, Call]
    names: Mapping[str, str]
    draws: Mapping[str, str]
    moves: Moves
    outside: Outside
    placing: Placing
    presence: Presence


class _Half:
    """The lines of one half; what it needs from outside, by first use; what it made and still has."""

    def __init__(
        self,
        writer: _Writer,
        steps: Sequence[Step],
        ends: Iterable[End] = (),
        looked: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        """`ends` has, by step, the tensors that leave after it; tensors freed there are freed first.

        `looked` are gradients of outputs, by their positions.
        """
        self.lines: list[_Line] = []
        self.needed: dict[str, None] = {}
        self.bound: set[str] = set()
        self.pieces: list[Piece] = []
        self._ops, self._calls, self._names = writer.ops, writer.calls, writer.names
        self._draws, self._moves, self._outside = writer.draws, writer.moves, writer.outside
        self._placing, self._presence = writer.placing, writer.presence
        self._place, self._looked = "", looked
        self._read: dict[str, bool] = {}
        waiting = list(ends)
        for number, step in enumerate(steps):
            while waiting and waiting[0].step < number and not isinstance(step, Free):
                self._hand_on(waiting.pop(0))
            self._take(step)
            if waiting and waiting[0].consumed and waiting[0].step == number:  # before they are freed
                self._hand_on(waiting.pop(0))
        for end in waiting:
            self._hand_on(end)

    @property
    def made(self) -> set[str]:
        """The tensors that the half has made and not freed."""
        return self.bound - self.needed.keys()

    def give(self, tensors: Iterable[str]) -> None:
        """The tensors must be there now."""
        tensors = tuple(tensors)
        self._need(tensors)
        self._write(self._moves.wait_for(tensors))

    def _hand_on(self, end: End) -> None:
        """Nothing of their storages stays here: whoever takes a gradient may be the only one to hold it."""
        gradients = end.gradients
        self.give(gradients)
        self._place = ""
        gone = [*gradients, *self._outside.sharing(gradients, self.bound.difference(gradients))]
        if gradients:
            self._write([f"handed += [{_list(self._names, gradients)}]", f"del {_list(self._names, gone)}"])
        self._write(["yield"])
        self.bound.difference_update(gone)
        self.pieces.append(Piece(gradients, self._read, end.consumed))
        self._read = {}

    def _take(self, step: Step) -> None:
        match step:
            case Compute(op) if self._ops[op].type == UPDATE:
                """Gradients are handed on at the end of the piece; whoever takes them runs the update."""
            case Compute(op, overwrites):
                self._run(self._ops[op], dict(overwrites), wanted=tuple(self._ops[op].writes()))
            case RecomputeOp(op, outputs, overwrites):
                self._run(self._ops[op], dict(overwrites), wanted=outputs, again=True)
            case Free(tensors):
                self._free(tensors)
            case Store(tensors):
                self._need(tensors)
                self._write([*self._presence.zeros(tensors), self._moves.store(tensors)])
            case Load(tensors):
                self._write([self._moves.load(tensors)])
                self.bound.update(tensors)

    def _write(self, lines: Iterable[str]) -> None:
        self.lines += (_Line(f"    {line}", self._place) for line in lines)

    def _need(self, tensors: Iterable[str]) -> None:
        for name in tensors:
            if name not in self.bound:
                self.needed[name] = None
                self.bound.add(name)

    def _free(self, tensors: Sequence[str]) -> None:
        if waiting := self._moves.wait_for(tensors):
            self._need(
                tensors
            )  # it leaves memory here and nowhere before, even if no op of this half reads it
            self._write(waiting)
        gone = [name for name in tensors if name in self.bound]
        self.bound.difference_update(gone)
        if gone:
            self._write([f"del {_list(self._names, gone)}"])

    def _run(
        self, op: Op, overwrites: Mapping[str, str], wanted: tuple[str, ...], *, again: bool = False
    ) -> None:
        call = self._calls[op.id]
        self._place = _place_of(op, again)
        for name in self._outside.read_by(op):
            self._read[name] = self._read.get(name, False) or again
        self._need(inputs_of(call))
        self._write(self._moves.wait_for(inputs_of(call)))
        dropped = set(op.writes()).difference(wanted)
        names = {**self._names, **dict.fromkeys(dropped, _DROPPED)} if dropped else self._names
        lines = self._placing.lines(op, call, overwrites, names, wanted)
        lines += [f"del {_DROPPED}"] if dropped else []
        lines = self._placing.around(op, lines, names)
        lines = self._presence.around(op, call, lines, wanted)
        self._write(self._drawing_the_same(op, lines, again))
        for name in () if again else wanted:
            self._write(_looks(self._names[name], self._looked.get(name, ())))
        self.bound.update(wanted)

    def _drawing_the_same(self, op: Op, lines: list[str], again: bool) -> list[str]:
        """The lines of a recomputed random op, within lines that repeat the draws of its first run.

        However the op ends, the generator continues where it was. On the CPU a method of PyTorch sets the
        state; no interrupt is handled at its beginning.
        """
        if op.id not in self._draws:
            return lines
        generator, state, place = "torch.default_generator", "state", ""
        if op.device != "cpu":  # the generator of this device, whichever is the current one
            generator, state, place = f"torch.get_device_module({op.device!a})", "rng_state", f"{op.device!a}"
        read = f"{generator}.get_{state}({place})"
        if not again:
            return [f"{self._draws[op.id]} = {read}", *lines]
        place = f", {place}" if place else ""
        return [
            f"now = {read}",
            "try:",
            f"    {generator}.set_{state}({self._draws[op.id]}{place})",
            *(f"    {line}" for line in lines),
            "finally:",
            f"    {generator}.set_{state}(now{place})",
            "del now",
        ]


def _place_of(op: Op, again: bool) -> str:
    prefix = "recomputed: " if again else "backward of " if op.phase is Phase.BACKWARD and op.scope else ""
    return f"{prefix}{op.scope}  {basename(op.source)}".strip()


def _unpacking(
    names: Mapping[str, str],
    tensors: Iterable[str],
    source: str,
    *,
    clear: bool,
    further: Iterable[str] = (),
) -> list[_Line]:
    listed = _list(names, tensors, further)
    if not listed:
        return []
    wrapper = TextWrapper(100, initial_indent="    ", subsequent_indent="     ", break_long_words=False)
    lines = wrapper.wrap(f"[{listed}]")
    lines[-1] += f" = {source}"
    if clear:
        lines.append(f"    {source}.clear()")
    return [_Line(line) for line in lines]


def _list(names: Mapping[str, str], tensors: Iterable[str], further: Iterable[str] = ()) -> str:
    return ", ".join((*(names[tensor] for tensor in tensors), *further))


def _tuple(names: Mapping[str, str], tensors: Sequence[str]) -> str:
    return f"({_list(names, tensors)}{',' if len(tensors) == 1 else ''})"
