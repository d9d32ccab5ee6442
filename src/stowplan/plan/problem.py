"""Problem: a graph as a planner sees it. Values are storages; views cost nothing and are folded away.

Ops are positions in the graph's order. Ops before `turn` are the forward half. A value made there may be
dropped and recomputed for the ops after `turn`; there is no other choice. Without a backward half nothing can
be dropped. `slices_last` is an order of the same ops that needs less memory and costs no time.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import frexp, fsum, ldexp

from stowplan.analyse.facts import Storages, is_resident, storages_of
from stowplan.ir import Graph, Kind, Op, Phase, Role, Tensor, Use
from stowplan.ops.effects import ONCE, aliasing_of, effect_of, only_updates_statistics
from stowplan.ops.table import Site, site_of


def slices_last(graph: Graph) -> Graph:
    """If two ops contribute to a gradient, the one that adds in place comes after the one that does not.

    If the gradient of a slice comes first, it is a whole tensor with zeros around the slice, and the next
    contribution needs as much memory again. Added last, it needs none. The sum is the same to the bit.
    """
    ops = list(graph.ops)
    for name, contributors in _contributors(graph).items():
        if len(contributors) == 2:
            first, second = contributors
            if _adds_in_place(graph, first) and not _adds_in_place(graph, second):
                _swap(ops, first, second, name)
    return replace(graph, ops=tuple(ops))


def _contributors(graph: Graph) -> dict[str, list[Op]]:
    by_tensor: dict[str, list[Op]] = {}
    shared = {use.tensor for op in graph.ops for use in op.outputs if use.role is Role.ACCUMULATE}
    for op in graph.ops:
        for name in shared.intersection(op.writes()):
            by_tensor.setdefault(name, []).append(op)
    return by_tensor


def _adds_in_place(graph: Graph, op: Op) -> bool:
    return len(op.outputs) == 1 and aliasing_of(site_of(graph, op)).adds_in_place


def _swap(ops: list[Op], first: Op, second: Op, name: str) -> None:
    """Run `first` right after `second`, and let `second` make the tensor."""
    ids = [op.id for op in ops]
    ops.pop(ids.index(first.id))
    place = ids.index(second.id) - 1
    ops[place] = _contributing(second, name, Role.DATA)
    ops.insert(place + 1, _contributing(first, name, Role.ACCUMULATE))


def _contributing(op: Op, name: str, role: Role) -> Op:
    return replace(op, outputs=tuple(Use(name, role) if use.tensor == name else use for use in op.outputs))


Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything the planner needs, by number: values 0..V-1, ops 0..N-1.

    `in_place[op]` pairs an output value with the input values it may overwrite when they die at the op.
    `standing_bytes` is what is always there: parameters, buffers, inputs that the caller holds.
    """

    graph: Graph
    owners: tuple[str, ...]  # value -> the tensor that owns the storage
    nbytes: Numbers
    producer: Numbers  # value -> op, -1 for a source
    held: tuple[bool, ...]
    droppable: tuple[bool, ...]
    reads: tuple[Numbers, ...]
    writes: tuple[Numbers, ...]
    in_place: tuple[tuple[tuple[int, Numbers], ...], ...]
    temporary_bytes: Numbers
    seconds: tuple[float, ...]
    turn: int
    standing_bytes: int


def problem_of(
    graph: Graph, seconds: Sequence[float], workspace_bytes: Mapping[str, int] | None = None
) -> Problem:
    """Number the values and ops of `graph`; `workspace_bytes` has the workspace of kernels, by op id."""
    values = Values(graph)
    turn = next((i for i, op in enumerate(graph.ops) if op.phase is Phase.BACKWARD), len(graph.ops))
    outdated, summed = outdated_tensors(graph), _summed_in(graph, graph.ops[:turn])
    again = [can_recompute(graph, op, outdated) and summed.isdisjoint(op.reads()) for op in graph.ops]
    booked = {values.number_of(name) for op in graph.ops if op.phase is Phase.UPDATE for name in op.reads()}
    sums = {values.number_of(name) for name in summed}
    producer = tuple(values.maker.get(owner, -1) for owner in values.owners)
    held = {values.number_of(name) for name in graph.held}
    return Problem(
        graph=graph,
        owners=values.owners,
        nbytes=values.nbytes,
        producer=producer,
        held=tuple(value in held for value in range(len(producer))),
        droppable=tuple(
            0 <= op < turn < len(graph.ops) and again[op] and value not in held | booked | sums
            for value, op in enumerate(producer)
        ),
        reads=tuple(values.read_by(op) for op in graph.ops),
        writes=tuple(values.made_by(op) for op in graph.ops),
        in_place=tuple(values.overwritable_by(op) for op in graph.ops),
        temporary_bytes=tuple(values.temporary_of(op, workspace_bytes or {}) for op in graph.ops),
        seconds=tuple(seconds),
        turn=turn,
        standing_bytes=values.standing_bytes,
    )


_STEP_TICKS = 44  # a step takes 2**43 to 2**44 ticks


def ticks_of(problem: Problem) -> tuple[Numbers, float]:
    """The seconds of each op as a whole number of ticks, and the seconds of a tick.

    Whole numbers have the same sum in any order, on any machine and in any version of Python, so a search
    that counts in ticks finds the same schedules everywhere. A tick is a power of two, so seconds are exact.
    """
    _, largest = frexp(max(problem.seconds, default=0.0))  # the sum itself could overflow
    _, exponent = frexp(fsum(ldexp(seconds, -largest) for seconds in problem.seconds))
    tick_seconds = ldexp(1.0, max(largest + exponent - _STEP_TICKS, -1074))
    return tuple(round(seconds / tick_seconds) for seconds in problem.seconds), tick_seconds


def overwritable(graph: Graph, site: Site, made: Container[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Each fresh output with the inputs it may overwrite if they die: alike, and `made` in the step.

    The op would read of a view of the input what it writes into it.
    """
    pairs = []
    inside: dict[str, set[str]] = defaultdict(set)
    for tensor in site.inputs:
        inside[graph.storage_of(tensor.id)].add(tensor.id)
    left = {tensor.id for tensor in site.inputs if len(inside[graph.storage_of(tensor.id)]) == 1}
    for output, inputs in aliasing_of(site).in_place_of.items():
        target = site.outputs[output]
        victims = [site.inputs[i] for i in inputs if site.inputs[i].id in left]
        fitting = tuple(v.id for v in victims if _same_block(graph, v, target, made))
        left -= set(fitting)
        if fitting and target.alias_of is None:
            pairs.append((target.id, fitting))
    return pairs


def made_aside(graph: Graph, op: Op) -> tuple[str, ...]:
    """The outputs that `op` makes in a place of their own before it adds them into what is there."""
    added = added_by(op)
    return () if added and aliasing_of(site_of(graph, op)).adds_in_place else added


def added_by(op: Op) -> tuple[str, ...]:
    """The tensors that `op` adds into."""
    return tuple(use.tensor for use in op.outputs if use.role is Role.ACCUMULATE)


def _summed_in(graph: Graph, ops: Iterable[Op]) -> frozenset[str]:
    """The tensors in storages that one of the ops adds into: they are not the same before and after."""
    roots = {graph.storage_of(name) for op in ops for name in added_by(op)}
    return (
        frozenset(name for name in graph.tensors if graph.storage_of(name) in roots) if roots else frozenset()
    )


def _same_block(graph: Graph, victim: Tensor, target: Tensor, made: Container[str]) -> bool:
    owner = graph.tensors[graph.storage_of(victim.id)]
    whole = owner.nbytes == victim.nbytes == target.nbytes
    one, other = ((t.shape, t.dtype, t.layout, t.device) for t in (victim, target))
    return whole and one == other and owner.id in made


def updated_buffers(graph: Graph) -> frozenset[str]:
    """The buffers whose contents the step changes."""
    return frozenset(
        graph.tensors[name].alias_of or name
        for op in graph.ops
        if op.phase is Phase.UPDATE
        for name in op.writes()
    )


def outdated_tensors(graph: Graph) -> frozenset[str]:
    """The buffers that the step changes and the views of their old contents: a second read finds the new."""
    outdated, number_of = set(updated_buffers(graph)), storages_of(graph).number_of
    for op in graph.ops if outdated else ():
        changed = {number_of[name] for name in op.reads() if name in outdated}
        outdated.update(name for name in op.writes() if number_of[name] in changed)
    return frozenset(outdated)


SETS_APART = "sets_apart"
"""The attribute of ops that copy a tensor of the caller's, who may change it before backward."""


def can_recompute(graph: Graph, op: Op, outdated: frozenset[str]) -> bool:
    """Whether a second run makes the same: a forward op or a view, no effect that happens once, nothing read
    that was changed meanwhile."""
    site = site_of(graph, op)
    only_views = all(tensor.alias_of is not None for tensor in site.outputs)
    if op.phase is not Phase.FORWARD and not (op.phase is Phase.BACKWARD and only_views):
        return False
    if op.attributes.get(SETS_APART):
        return False
    if effect_of(site) & ONCE:
        return False
    return outdated.isdisjoint(op.reads()) or only_updates_statistics(site)


class Values:
    """The numbering of storages that come and go during the step."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._storages: Storages = storages_of(graph)
        self.maker = {
            use.tensor: position
            for position, op in enumerate(graph.ops)
            for use in op.outputs
            if use.role is Role.DATA
        }
        standing = self._standing()
        numbers = [n for n in range(len(self._storages.owners)) if n not in standing]
        value_of_storage = {number: value for value, number in enumerate(numbers)}
        of_names = ((name, value_of_storage.get(n)) for name, n in self._storages.number_of.items())
        self._value_of = {name: value for name, value in of_names if value is not None}
        self.owners = tuple(self._storages.owners[number] for number in numbers)
        self.nbytes = tuple(int(self._storages.nbytes[number]) for number in numbers)
        self.standing_bytes = sum(
            int(self._storages.nbytes[number])
            for number in standing
            if graph.tensors[self._storages.owners[number]].kind is not Kind.CONSTANT
        )

    def _standing(self) -> set[int]:
        tensors, number_of = self._graph.tensors, self._storages.number_of
        return {
            number_of[name]
            for name, tensor in tensors.items()
            if is_resident(tensor)
            or (name in self._graph.held and self._graph.storage_of(name) not in self.maker)
        }

    def number_of(self, name: str) -> int | None:
        """The value a tensor lives in; None for what is always there."""
        return self._value_of.get(name)

    def _numbers(self, names: Iterable[str]) -> Numbers:
        known = self._value_of
        return tuple(dict.fromkeys(known[name] for name in names if name in known))

    def made_by(self, op: Op) -> Numbers:
        """The values whose storage this op allocates."""
        return self._numbers(
            use.tensor
            for use in op.outputs
            if use.role is Role.DATA and self._graph.storage_of(use.tensor) == use.tensor
        )

    def read_by(self, op: Op) -> Numbers:
        """The values that must be there before this op runs: what it reads, adds into or views."""
        made = self.made_by(op)
        return tuple(value for value in self._numbers((*op.reads(), *op.writes())) if value not in made)

    def overwritable_by(self, op: Op) -> tuple[tuple[int, Numbers], ...]:
        """`overwritable` in numbers, without what is always there."""
        pairs = (
            (self._numbers([output]), self._numbers(victims))
            for output, victims in overwritable(self._graph, site_of(self._graph, op), self.maker)
        )
        return tuple((output[0], victims) for output, victims in pairs if output and victims)

    def temporary_of(self, op: Op, workspace_bytes: Mapping[str, int]) -> int:
        """The bytes of an op beyond operands and results: kernel workspace, a second contribution."""
        added = self._numbers(made_aside(self._graph, op))
        return workspace_bytes.get(op.id, 0) + sum(self.nbytes[value] for value in added)
