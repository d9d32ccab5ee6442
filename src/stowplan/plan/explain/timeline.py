"""The timeline of a plan: a walk over its steps that records which tensor was in memory when."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from stowplan.analyse.timeline import Doing, Run, Stay, Timeline, curve_onto, packed_arena, timeline_of
from stowplan.ir import Graph, Kind, Op, Role
from stowplan.plan.explain.transfers import with_transfers
from stowplan.plan.judge.simulate import transfer_bytes
from stowplan.plan.plan import Compute, Free, Load, Plan, RecomputeOp, Store, transfer_id
from stowplan.plan.problem import made_aside


def timeline_of_plan(plan: Plan) -> Timeline:
    """The runs of a legal plan, and every copy of every tensor that is in memory meanwhile."""
    graph = with_transfers(plan)
    walk = _Walk(plan.graph)
    ops = {op.id: op for op in graph.ops}
    for step in plan.steps:
        match step:
            case Compute(name, overwrites):
                walk.run(ops[name], tuple(ops[name].writes()), dict(overwrites), Doing.COMPUTE)
            case RecomputeOp(name, outputs, overwrites):
                walk.run(ops[name], outputs, dict(overwrites), Doing.RECOMPUTE)
            case Free(names):
                walk.free(names)
            case Store(names):
                walk.store(ops[transfer_id(step)], names)
            case Load(names):
                walk.load(ops[transfer_id(step)], names)
            case _:
                assert_never(step)
    workspace = plan.pricing.workspace_bytes
    beside = transfer_bytes(plan.graph, plan.steps, plan.pricing.tier)
    runs = (Run(r.op, r.doing, r.aside_bytes + workspace.get(r.op, 0) + beside) for r in walk.runs)
    return Timeline(graph, tuple(runs), walk.stays(), walk.away())


def packed_bytes_of(plan: Plan) -> int:
    """The bytes of one arena that holds all that the plan holds, each tensor at one address."""
    return packed_arena(timeline_of_plan(plan)).nbytes


def baseline_timeline_of(plan: Plan) -> Timeline:
    """The baseline: the same graph in its order, with nothing overwritten and nothing recomputed."""
    return timeline_of(plan.graph, plan.pricing.workspace_bytes)


def baseline_curve_of(plan: Plan, axis: Timeline) -> tuple[str, NDArray[np.int64]]:
    """The memory of the step without the plan, for each run of `axis`, and what to call it.

    A plan with tiles has no longer the graph without them, and knows only how high that went.
    """
    if plan.tile_maps:
        return "baseline peak", np.full(len(axis.runs), plan.plain_peak_bytes, dtype=np.int64)
    return "baseline", curve_onto(axis, baseline_timeline_of(plan))


@dataclass(slots=True)
class _Place:
    """A storage while the walk goes on: the tensor whose value it holds, and how many names it has."""

    number: int
    tensor: str
    copy: int
    first: int
    made: bool
    names: int = 0
    uses: list[int] = field(default_factory=list)


class _Walk:
    """Binds names to places as the steps go by; a place is left when its last name is freed."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._place_of: dict[str, _Place] = {}
        self._copies: dict[str, int] = {}
        self._places = 0
        self._stays: list[Stay] = []
        self._stored: dict[str, tuple[int, list[int]]] = {}  # by owner when it was stored, and loaded
        self.runs: list[Run] = []
        made = {name for op in graph.ops for name in op.writes()}
        roots = [name for name in graph.tensors if name not in made]
        for name in roots:
            if graph.tensors[name].alias_of is None:
                self._bind(name, self._new_place(name, made=False))
        for name in roots:
            if graph.tensors[name].alias_of is not None:
                self._bind(name, self._place_of[self._graph.storage_of(name)])

    def run(self, op: Op, wanted: tuple[str, ...], overwrites: dict[str, str], doing: Doing) -> None:
        """One execution: what is used, what is made and where."""
        number = len(self.runs)
        aside = sum(self._size(name) for name in made_aside(self._graph, op))
        self._use(number, op)
        for name in (use.tensor for use in op.outputs if use.role is Role.DATA):
            base = self._graph.tensors[name].alias_of
            if base is not None and name in wanted:
                self._bind(name, self._place_of[self._viewed(op, name)])
            elif base is None and name in overwrites:
                self._take_over(name, self._place_of[overwrites[name]])
            elif base is None and name in wanted:
                self._bind(name, self._new_place(name, made=True))
            elif base is None:
                aside += self._size(name)
        self.runs.append(Run(op.id, doing, aside))

    def free(self, names: Iterable[str]) -> None:
        """Free names after the latest run."""
        for name in names:
            self._unbind(name, last=len(self.runs) - 1)

    def store(self, transfer: Op, names: Sequence[str]) -> None:
        """Written to the tier, and in memory until it is freed."""
        owner = self._graph.storage_of(names[0])
        self._place_of[names[0]].uses.append(len(self.runs))
        self._stored[owner] = (len(self.runs), [])
        self.runs.append(Run(transfer.id, Doing.STORE))

    def load(self, transfer: Op, names: Sequence[str]) -> None:
        """Back into a place of its own."""
        owner = self._graph.storage_of(names[0])
        place = self._new_place(owner, made=True)
        for name in names:
            self._bind(name, place)
        self._stored[owner][1].append(len(self.runs))
        self.runs.append(Run(transfer.id, Doing.LOAD))

    def away(self) -> tuple[Stay, ...]:
        """The stays in the tier, each until its last load or the end of the step."""
        end = len(self.runs) - 1
        return tuple(
            Stay(name, self._size(name), first, max(loads, default=end), True, tuple(loads), number)
            for number, (name, (first, loads)) in enumerate(self._stored.items())
        )

    def stays(self) -> tuple[Stay, ...]:
        """All that were closed, and those that last to the end."""
        open_places = {place.number: place for place in self._place_of.values()}
        for place in open_places.values():
            self._close(place, last=len(self.runs) - 1)
        return tuple(sorted(self._stays, key=lambda stay: (stay.first, stay.place)))

    def _use(self, number: int, op: Op) -> None:
        added = (use.tensor for use in op.outputs if use.role is Role.ACCUMULATE)
        used = {self._place_of[name].number: self._place_of[name] for name in (*op.reads(), *added)}
        for place in used.values():
            place.uses.append(number)

    def _new_place(self, name: str, *, made: bool) -> _Place:
        place = _Place(self._places, name, self._next_copy(name), len(self.runs), made)
        self._places += 1
        return place

    def _take_over(self, name: str, place: _Place) -> None:
        """Write a tensor over the one in a place, whose stay ends with the run before."""
        self._close(place, last=len(self.runs) - 1)
        place.tensor, place.copy = name, self._next_copy(name)
        place.first, place.made, place.uses = len(self.runs), True, []
        self._bind(name, place)

    def _next_copy(self, name: str) -> int:
        copy = self._copies.get(name, -1) + 1
        self._copies[name] = copy
        return copy

    def _bind(self, name: str, place: _Place) -> None:
        self._unbind(name, last=len(self.runs) - 1)
        self._place_of[name] = place
        place.names += 1

    def _unbind(self, name: str, last: int) -> None:
        place = self._place_of.pop(name, None)
        if place is not None:
            place.names -= 1
            if not place.names:
                self._close(place, last)

    def _close(self, place: _Place, last: int) -> None:
        constant = self._graph.tensors[place.tensor].kind is Kind.CONSTANT
        if place.first <= last and not constant:
            self._stays.append(
                Stay(
                    place.tensor,
                    self._size(place.tensor),
                    place.first,
                    last,
                    place.made,
                    tuple(place.uses),
                    place.number,
                    place.copy,
                )
            )

    def _viewed(self, op: Op, view: str) -> str:
        """A bound name for what `view` is a view of: its owner may be freed while another view lives on."""
        root = self._graph.storage_of(view)
        return next((name for name in op.reads() if self._graph.storage_of(name) == root), root)

    def _size(self, name: str) -> int:
        return self._graph.tensors[name].nbytes or 0
