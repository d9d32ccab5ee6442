"""The timeline of a plan: a walk over its steps that records which tensor was in memory when."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from stowplan.analyse.timeline import Doing, OpRun, Stay, Timeline, curve_onto, packed_arena, timeline_of
from stowplan.ir import Graph, Kind, Op, Role
from stowplan.plan.draft import Schedule
from stowplan.plan.explain.transfers import with_transfers
from stowplan.plan.judge.simulate import transfer_bytes
from stowplan.plan.places import Place, Places
from stowplan.plan.problem import made_aside
from stowplan.plan.steps import Compute, Free, Load, RecomputeOp, Store, transfer_id


def timeline_of_plan(plan: Schedule) -> Timeline:
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
                for freed in names:
                    walk.unbind(freed)
            case Store(names):
                walk.store(ops[transfer_id(step)], names)
            case Load(names):
                walk.bring(ops[transfer_id(step)], names)
            case _:
                assert_never(step)
    workspace = plan.pricing.workspace_bytes
    beside = transfer_bytes(plan.graph, plan.steps, plan.pricing.tier)
    runs = (OpRun(r.op, r.doing, r.aside_bytes + workspace.get(r.op, 0) + beside) for r in walk.runs)
    return Timeline(graph, tuple(runs), walk.stays(), walk.away())


def packed_bytes_of(plan: Schedule) -> int:
    """The bytes of one arena that holds all that the plan holds, each tensor at one address."""
    return packed_arena(timeline_of_plan(plan)).nbytes


def baseline_timeline_of(plan: Schedule) -> Timeline:
    """The baseline: the same graph in its order, with nothing overwritten and nothing recomputed."""
    return timeline_of(plan.graph, plan.pricing.workspace_bytes)


def baseline_curve_of(plan: Schedule, axis: Timeline) -> tuple[str, NDArray[np.int64]]:
    """The memory of the step without the plan, for each run of `axis`, and what to call it.

    A plan with tiles has no longer the graph without them, and knows only how high that went.
    """
    if plan.tile_maps:
        return "baseline peak", np.full(len(axis.runs), plan.plain_peak_bytes, dtype=np.int64)
    return "baseline", curve_onto(axis, baseline_timeline_of(plan))


@dataclass(slots=True)
class _Opened:
    """A stay that goes on: which copy of its tensor it is, its first run, and the runs that use it."""

    copy: int
    first: int
    uses: list[int] = field(default_factory=list)


class _Walk(Places):
    """Closes a stay when its place is left or overwritten."""

    def __init__(self, graph: Graph) -> None:
        self._opened: dict[int, _Opened] = {}  # by the number of the place
        self._copies: dict[str, int] = {}
        self._stays: list[Stay] = []
        self._stored: dict[str, tuple[int, list[int]]] = {}  # by owner when it was stored, and loaded
        self.runs: list[OpRun] = []
        super().__init__(graph)

    def run(self, op: Op, wanted: tuple[str, ...], overwritten: dict[str, str], doing: Doing) -> None:
        """One execution of an op."""
        self.execute(op, wanted, overwritten)
        unwanted = (
            use.tensor
            for use in op.outputs
            if use.role is Role.DATA and self._graph.tensors[use.tensor].alias_of is None
            if use.tensor not in wanted and use.tensor not in overwritten
        )
        aside = sum(map(self._size, (*made_aside(self._graph, op), *unwanted)))
        self.runs.append(OpRun(op.id, doing, aside))

    def store(self, transfer: Op, names: Sequence[str]) -> None:
        """Written to the tier, and in memory until it is freed."""
        self.uses(self.place_of(names[0]))
        self._stored[self._graph.storage_of(names[0])] = (len(self.runs), [])
        self.runs.append(OpRun(transfer.id, Doing.STORE))

    def bring(self, transfer: Op, names: Sequence[str]) -> None:
        """Back into a place of its own."""
        self.load(names)
        self._stored[self._graph.storage_of(names[0])][1].append(len(self.runs))
        self.runs.append(OpRun(transfer.id, Doing.LOAD))

    def away(self) -> tuple[Stay, ...]:
        """The stays in the tier, each until its last load or the end of the step."""
        end = len(self.runs) - 1
        return tuple(
            Stay(name, self._size(name), first, max(loads, default=end), True, tuple(loads), number)
            for number, (name, (first, loads)) in enumerate(self._stored.items())
        )

    def stays(self) -> tuple[Stay, ...]:
        """All that were closed, and those that last to the end."""
        for place in self.occupied():
            self.leaves(place)
        return tuple(sorted(self._stays, key=lambda stay: (stay.first, stay.place)))

    def uses(self, place: Place) -> None:
        """Noted for the stay in the place."""
        self._opened[place.number].uses.append(len(self.runs))

    def overwrites(self, place: Place) -> None:
        """The stay ends with the run before."""
        self.leaves(place)

    def opens(self, place: Place) -> None:
        """A stay begins with this run."""
        copy = self._copies[place.tensor] = self._copies.get(place.tensor, -1) + 1
        self._opened[place.number] = _Opened(copy, len(self.runs))

    def leaves(self, place: Place) -> None:
        """The stay ends with the latest run."""
        last, stay, tensor = len(self.runs) - 1, self._opened[place.number], place.tensor
        if stay.first <= last and self._graph.tensors[tensor].kind is not Kind.CONSTANT:
            size, uses = self._size(tensor), tuple(stay.uses)
            found = Stay(tensor, size, stay.first, last, place.made, uses, place.number, stay.copy)
            self._stays.append(found)

    def _size(self, name: str) -> int:
        return self._graph.tensors[name].nbytes or 0
