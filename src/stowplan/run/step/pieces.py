"""Pieces: the stretches of a backward half, each of which ends where gradients leave it.

A gradient is final when no later step reads or writes its storage, nor reads the parameter it is of: from
then on hooks and optimizers may change both. Gradients leave in the order in which eager accumulates them, as
soon as they are final; those that share a storage leave together. Small ones wait until there is enough to be
worth an autograd node. In the plan of a whole iteration, gradients that an update in backward consumes leave
where the plan has that update.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stowplan.analyse.facts import Storages, storages_of
from stowplan.capture import Program, Ref
from stowplan.capture.program import inputs_of
from stowplan.ir import Graph, Op
from stowplan.ops.effects import UPDATE, only_updates_statistics
from stowplan.ops.table import site_of
from stowplan.plan.plan import Compute, Free, Load, RecomputeOp, Step, Store
from stowplan.plan.problem import outdated_tensors

_SHARE = 64  # no piece but the last hands on less than this part of the bytes of all gradients


@dataclass(frozen=True, slots=True)
class Piece:
    """`read` are the tensors from outside the step whose contents the piece relies on.

    They are paired with whether something is recomputed from them that eager would have kept. The gradients
    may be `consumed`: they are freed before the next piece.
    """

    gradients: tuple[str, ...]
    read: Mapping[str, bool]
    consumed: bool = False


class End(NamedTuple):
    """A piece ends after a step of the backward half, and gradients leave it there."""

    step: int
    gradients: tuple[str, ...]
    consumed: bool = False


def ends_of_pieces(graph: Graph, program: Program, steps: Sequence[Step]) -> list[End]:
    """Where pieces end among the `steps` of the backward half; the last one does with the last step.

    If the last gradients are consumed, nothing is left to do behind that.
    """
    consumed = list(_consumed(graph, program, steps))
    gone = {gradient for end in consumed for gradient in end.gradients}
    storages = storages_of(graph)
    final = _last_touches(graph, program, steps, storages)
    wanted: dict[int, list[str]] = {}  # by storage
    for gradient in dict.fromkeys(program.gradients.values()):
        if gradient not in gone:
            wanted.setdefault(storages.number_of[gradient], []).append(gradient)
    last: dict[int, int] = {}
    for name, gradient in program.gradients.items():
        number = storages.number_of[gradient]
        ends = (final.get(storages.number_of[name], -1), final.get(number, -1))
        if number in wanted:
            last[number] = max(last.get(number, -1), *ends)
    latest = -1
    for number in wanted:  # in eager's order, which hooks rely on
        latest = last[number] = max(latest, last[number])
    nbytes = {number: int(storages.nbytes[number]) for number in wanted}
    others = (
        End(step, tuple(gradient for number in numbers for gradient in wanted[number]))
        for step, numbers in grouped(last, nbytes)
    )
    found = sorted([*consumed, *others], key=lambda end: end.step)
    return found if found[-1].consumed else [*found[:-1], found[-1]._replace(step=len(steps) - 1)]


def _consumed(graph: Graph, program: Program, steps: Sequence[Step]) -> Iterator[End]:
    """Where updates in backward take their gradients."""
    updates = {op.id for op in graph.ops if is_in_backward(op)}
    for position, step in enumerate(steps):
        if isinstance(step, Compute) and step.op in updates:
            gradients = program.calls[step.op].args[0]
            assert isinstance(gradients, tuple)
            yield End(position, tuple(ref.tensor for ref in gradients if isinstance(ref, Ref)), consumed=True)


def is_in_backward(op: Op) -> bool:
    """Whether an op is an update, or an addition, to which backward hands gradients on."""
    return op.type == UPDATE and op.attributes["when"] in ("in backward", "later")


def grouped(last: Mapping[int, int], nbytes: Mapping[int, int]) -> Iterator[tuple[int, list[int]]]:
    """Storages that leave together, in order, after which step: enough of them, but for the last group.

    `last` has the step by which each may leave.
    """
    enough, gathered, group = sum(nbytes.values()) / _SHARE, 0, list[int]()
    order = sorted(last, key=lambda number: last[number])
    for number, following in zip(order, [*order[1:], None], strict=True):
        group.append(number)
        gathered += nbytes[number]
        if following is None or (gathered >= enough and last[following] > last[number]):
            yield last[number], group
            group, gathered = [], 0


def _last_touches(
    graph: Graph, program: Program, steps: Sequence[Step], storages: Storages
) -> dict[int, int]:
    """The last of the steps that reads, writes or moves each storage."""
    ops = {op.id: op for op in graph.ops}
    return {
        storages.number_of[name]: position
        for position, step in enumerate(steps)
        for name in _touched(ops, program, step)
    }


def _touched(ops: Mapping[str, Op], program: Program, step: Step) -> Iterable[str]:
    match step:
        case Compute(op) if ops[op].type == UPDATE:
            return ()
        case Compute(op) | RecomputeOp(op):
            return *inputs_of(program.calls[op]), *ops[op].writes()
        case Store(tensors) | Load(tensors):
            return tensors
        case Free():
            return ()


class Outside:
    """Which tensors that others can change an op relies on."""

    def __init__(self, graph: Graph, program: Program, outputs: Iterable[str]) -> None:
        self._graph, self._calls, self._outdated = graph, program.calls, outdated_tensors(graph)
        self._storages = storages_of(graph)
        made = {name for op in graph.ops for name in op.writes()}
        own = {name for name in program.tangents if name is not None}
        names = [*(name for name in graph.tensors if name not in made | own), *outputs]
        self._seen_as: dict[int, str] = {}  # by storage: the name under which others hold it
        for name in names:
            self._seen_as.setdefault(self._storages.number_of[name], name)

    def read_by(self, op: Op) -> Iterator[str]:
        """Not the running statistics of a norm that does not normalise by them."""
        ignored = self._outdated if only_updates_statistics(site_of(self._graph, op)) else ()
        reads = (name for name in inputs_of(self._calls[op.id]) if name not in ignored)
        numbers = (self._storages.number_of[name] for name in reads)
        return (self._seen_as[number] for number in numbers if number in self._seen_as)

    def sharing(self, tensors: Iterable[str], among: Iterable[str]) -> Iterator[str]:
        """Those that share a storage with one of `tensors`."""
        numbers = {self._storages.number_of[name] for name in tensors}
        return (name for name in sorted(among) if self._storages.number_of[name] in numbers)
