"""Idle intervals: the steps of a schedule during which a storage is in memory and no step uses it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stowplan.analyse.facts import storages_of
from stowplan.ir import Graph, Kind, Op, Role
from stowplan.plan.plan import Compute, Free, Load, RecomputeOp, Step, Store


@dataclass(frozen=True, slots=True)
class IdleInterval:
    """A storage with its names, idle after step `after` and used next by step `before`.

    Intervals have the same `contents` if nothing was written into the storage between them: it is stored once
    for all of them. An interval that lasts to the end has the number of steps as `before`.
    """

    tensors: tuple[str, ...]
    nbytes: int
    after: int
    before: int
    contents: tuple[int, int]


def idle_intervals_of(
    graph: Graph, steps: Sequence[Step], *, gradients: bool = False
) -> tuple[IdleInterval, ...]:
    """All idle intervals of storages that may leave; with `gradients` also those of parameter gradients."""
    walk = _Walk(graph, gradients)
    ops = {op.id: op for op in graph.ops}
    for number, step in enumerate(steps):
        match step:
            case Compute(op, overwrites):
                walk.run(number, ops[op], tuple(ops[op].writes()), dict(overwrites))
            case RecomputeOp(op, outputs, overwrites):
                walk.run(number, ops[op], outputs, dict(overwrites))
            case Free(tensors):
                walk.free(number, tensors)
            case Store() | Load():
                raise AssertionError("idle intervals are found before transfers are inserted")
    walk.end(len(steps))
    return tuple(walk.found)


@dataclass(slots=True)
class _Place:
    """A storage while the walk goes on."""

    number: int
    nbytes: int
    may_leave: bool
    idle_since: int
    writes: int = 0
    names: set[str] = field(default_factory=set)


class _Walk:
    """Binds names to places, step by step; a place that was idle before its use had an idle interval."""

    def __init__(self, graph: Graph, gradients: bool) -> None:
        self._graph = graph
        self._storages = storages_of(graph)
        self._place_of: dict[str, _Place] = {}
        self._places = 0
        self._held = {self._storages.number_of[name] for name in graph.held}
        self._gradients = gradients
        self.found: list[IdleInterval] = []

    def run(self, number: int, op: Op, wanted: tuple[str, ...], overwrites: dict[str, str]) -> None:
        """One execution of an op: the places that it uses become idle after it."""
        added = [use.tensor for use in op.outputs if use.role is Role.ACCUMULATE]
        used = {id(place): place for name in (*op.reads(), *added) if (place := self._place_of.get(name))}
        for place in used.values():
            self._use(place, number)
        for name in added:
            if place := self._place_of.get(name):
                place.writes += 1
        for name in (use.tensor for use in op.outputs if use.role is Role.DATA and use.tensor in wanted):
            self._bind(name, self._target(number, op, name, overwrites))

    def _target(self, number: int, op: Op, name: str, overwrites: dict[str, str]) -> _Place | None:
        """The place of an output: an input's that it overwrites, its base's if it is a view, or a new one."""
        if name in overwrites:
            place = self._place_of.get(overwrites[name])
            if place:
                place.writes += 1
                place.may_leave = self._may_leave(name)
            return place
        if self._graph.tensors[name].alias_of is not None:
            storage = self._storages.number_of
            viewed = (read for read in op.reads() if storage[read] == storage[name])
            return next((self._place_of[read] for read in viewed if read in self._place_of), None)
        self._places += 1
        nbytes = int(self._storages.nbytes[self._storages.number_of[name]])
        return _Place(self._places, nbytes, self._may_leave(name), number)

    def _may_leave(self, owner: str) -> bool:
        """Whether a storage may be offloaded. Results of the forward half stay, and so do complex tensors,
        whose conjugation PyTorch may keep as a flag instead of in the data."""
        tensor = self._graph.tensors[owner]
        if self._storages.number_of[owner] in self._held:
            return self._gradients and tensor.kind is Kind.GRADIENT
        return tensor.kind is not Kind.CONSTANT and "complex" not in str(tensor.dtype)

    def _bind(self, name: str, place: _Place | None) -> None:
        self._unbind(name)
        if place:
            self._place_of[name] = place
            place.names.add(name)

    def _unbind(self, name: str) -> None:
        place = self._place_of.pop(name, None)
        if place:
            place.names.discard(name)

    def _use(self, place: _Place, number: int) -> None:
        if number - place.idle_since > 1:
            self.found.extend(self._interval(place, number))
        place.idle_since = number

    def _interval(self, place: _Place, before: int) -> Iterator[IdleInterval]:
        if place.may_leave and place.nbytes and place.names:
            names = sorted(
                place.names, key=lambda name: (self._graph.tensors[name].alias_of is not None, name)
            )
            contents = (place.number, place.writes)
            yield IdleInterval(tuple(names), place.nbytes, place.idle_since, before, contents)

    def free(self, number: int, tensors: Sequence[str]) -> None:
        """Free names; the place is idle only after that."""
        for name in tensors:
            if place := self._place_of.get(name):
                place.idle_since = number
            self._unbind(name)

    def end(self, number: int) -> None:
        """Intervals that last to the end of the step: gradients that the caller holds."""
        for place in {id(place): place for place in self._place_of.values()}.values():
            self._use(place, number)
