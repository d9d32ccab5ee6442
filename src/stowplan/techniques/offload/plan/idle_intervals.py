"""Idle intervals: the steps of a schedule during which a storage is in memory and no step uses it."""

from collections.abc import Sequence
from dataclasses import dataclass

from stowplan.analyse.facts import storages_of
from stowplan.ir import Graph, Kind
from stowplan.ops.effects import UNDER_WAY
from stowplan.plan.places import Place, Places
from stowplan.plan.steps import Compute, Free, Load, RecomputeOp, Step, Store


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
    for walk.number, step in enumerate(steps):
        match step:
            case Compute(op, overwrites):
                walk.execute(ops[op], tuple(ops[op].writes()), dict(overwrites))
            case RecomputeOp(op, outputs, overwrites):
                walk.execute(ops[op], outputs, dict(overwrites))
            case Free(tensors):
                walk.free(tensors)
            case Store() | Load():
                raise AssertionError("idle intervals are found before transfers are inserted")
    walk.end(len(steps))
    return tuple(walk.found)


class _Walk(Places):
    """Finds an idle interval where a place that was idle is used."""

    def __init__(self, graph: Graph, gradients: bool) -> None:
        self._storages = storages_of(graph)
        self._held = {self._storages.number_of[name] for name in graph.held}
        self._complex = {
            self._storages.number_of[tensor.id]
            for tensor in graph.tensors.values()
            if tensor.dtype is not None and tensor.dtype.is_complex
        }
        self._gradients = gradients
        self._on_accelerator = any(op.device not in ("", "cpu") for op in graph.ops)
        self._received = {op.outputs[0].tensor for op in graph.ops if op.type in UNDER_WAY}
        self._under_way: set[int] = set()  # places that messages arrive in
        self._nbytes: dict[int, int] = {}  # of each place
        self._idle_since: dict[int, int] = {}
        self.number = 0  # of the step that runs
        self.found: list[IdleInterval] = []
        super().__init__(graph)
        self._given = {place.number for place in self.occupied()}

    def opens(self, place: Place) -> None:
        """Idle after the step that makes it."""
        storage = self._storages.number_of[place.tensor]
        self._nbytes.setdefault(place.number, int(self._storages.nbytes[storage]))
        self._idle_since.setdefault(place.number, self.number)
        if place.tensor in self._received:
            self._under_way.add(place.number)

    def uses(self, place: Place) -> None:
        """Idle again after this step, which waits for messages that are under way."""
        since, nbytes = self._idle_since[place.number], self._nbytes[place.number]
        if self.number - since > 1 and nbytes and place.names and self._may_leave(place):
            contents = (place.number, place.writes)
            names = tuple(sorted(place.names, key=self._owner_first))
            self.found.append(IdleInterval(names, nbytes, since, self.number, contents))
        self._idle_since[place.number] = self.number
        self._under_way.discard(place.number)

    def _owner_first(self, name: str) -> tuple[bool, str]:
        return self._graph.tensors[name].alias_of is not None, name

    def _may_leave(self, place: Place) -> bool:
        """Whether a storage may be offloaded. What the step is given stays, and so do results of the forward
        half, buffers that messages arrive in, and complex tensors with their real views, whose conjugation
        PyTorch may keep as a flag instead of in the data. What an accelerator's step has on the host is
        there already: attention keeps the state of its generator so."""
        tensor = self._graph.tensors[place.tensor]
        storage = self._storages.number_of[place.tensor]
        if place.number in self._given or place.number in self._under_way or storage in self._complex:
            return False
        if self._on_accelerator and tensor.device == "cpu":
            return False
        if storage in self._held:
            return self._gradients and tensor.kind is Kind.GRADIENT
        return tensor.kind is not Kind.CONSTANT

    def free(self, names: Sequence[str]) -> None:
        """Free names; the place is idle only after that."""
        for name in names:
            self._idle_since[self.place_of(name).number] = self.number
            self.unbind(name)

    def end(self, number: int) -> None:
        """Intervals that last to the end of the step: gradients that the caller holds."""
        self.number = number
        for place in self.occupied():
            self.uses(place)
