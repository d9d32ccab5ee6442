"""Stretches: while which steps of a schedule a storage is in memory and nobody uses it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stowplan.analyse.storages import storages_of
from stowplan.ir import Graph, Kind, Op, Role
from stowplan.plan.decision import Compute, Free, Load, RecomputeOp, Step, Store


@dataclass(frozen=True, slots=True)
class Stretch:
    """A storage under its names, idle behind step `after` and used next by step `before`.

    `contents` is the same for stretches between which nothing was written into the storage: it is stored once
    for all of them. A stretch that lasts to the end has the number of steps for `before`.
    """

    tensors: tuple[str, ...]
    nbytes: int
    after: int
    before: int
    contents: tuple[int, int]


def stretches_of(graph: Graph, steps: Sequence[Step], *, gradients: bool = False) -> tuple[Stretch, ...]:
    """All stretches of storages that may leave; with `gradients` those of parameter gradients, too."""
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
                raise AssertionError("stretches are looked for before anything is moved")
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
    """Binds names to places as the steps go by; a place that was idle when it is used had a stretch."""

    def __init__(self, graph: Graph, gradients: bool) -> None:
        self._graph = graph
        self._storages = storages_of(graph)
        self._place_of: dict[str, _Place] = {}
        self._places = 0
        self._held = {self._storages.number_of[name] for name in graph.held}
        self._gradients = gradients
        self.found: list[Stretch] = []

    def run(self, number: int, op: Op, wanted: tuple[str, ...], overwrites: dict[str, str]) -> None:
        """One execution: places that it uses are idle no more, and idle again behind it."""
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
        """Where an output comes to lie: over an input, in what it is a view of, or in a place of its own."""
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
        """What the caller gets at the end of the forward half stays; so do numbers with an imaginary part,
        which PyTorch may keep conjugated in name only."""
        tensor = self._graph.tensors[owner]
        if self._storages.number_of[owner] in self._held:
            return self._gradients and tensor.kind is Kind.GRADIENT
        return tensor.kind is not Kind.CONSTANT and "complex" not in str(tensor.dtype)

    def _bind(self, name: str, place: _Place | None) -> None:
        self._let_go(name)
        if place:
            self._place_of[name] = place
            place.names.add(name)

    def _let_go(self, name: str) -> None:
        place = self._place_of.pop(name, None)
        if place:
            place.names.discard(name)

    def _use(self, place: _Place, number: int) -> None:
        if number - place.idle_since > 1:
            self.found.extend(self._stretch(place, number))
        place.idle_since = number

    def _stretch(self, place: _Place, before: int) -> Iterator[Stretch]:
        if place.may_leave and place.nbytes and place.names:
            names = sorted(
                place.names, key=lambda name: (self._graph.tensors[name].alias_of is not None, name)
            )
            contents = (place.number, place.writes)
            yield Stretch(tuple(names), place.nbytes, place.idle_since, before, contents)

    def free(self, number: int, tensors: Sequence[str]) -> None:
        """Names go; the place is not idle before they are gone."""
        for name in tensors:
            if place := self._place_of.get(name):
                place.idle_since = number
            self._let_go(name)

    def end(self, number: int) -> None:
        """Gradients that are held wait for the end of the step."""
        for place in {id(place): place for place in self._place_of.values()}.values():
            self._use(place, number)
