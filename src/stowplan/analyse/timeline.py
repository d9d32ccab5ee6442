"""Timeline: the runs of a step in order and the bytes in memory during each. Graphs and plans both have one.

A run is one execution of one op, or the start of one transfer. Constants are not counted. The module also
puts the memory curve of one step on the axis of another, and gives every stay an address in an arena.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from stowplan.analyse.facts import Liveness, liveness_of
from stowplan.analyse.packing import PackedBlock, pack
from stowplan.ir import Allocation, Graph, Kind, Reserved, Role


class Doing(StrEnum):
    """The reason why an op runs."""

    COMPUTE = "compute"  # for the first time
    RECOMPUTE = "recompute"  # a second time, because its result was freed
    STORE = "store"  # to write a tensor to a tier
    LOAD = "load"  # to read it back

    @property
    def is_transfer(self) -> bool:
        """Whether it overlaps with the ops."""
        return self in (Doing.STORE, Doing.LOAD)


@dataclass(frozen=True, slots=True)
class OpRun:
    """One execution of an op. `aside_bytes` is its workspace while it runs."""

    op: str
    doing: Doing = Doing.COMPUTE
    aside_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Stay:
    """One copy of a tensor in memory from run `first` to run `last`, inclusive.

    `made` is False for tensors that existed before the step. `uses` are the runs that read it or add into it,
    also through views. `copy` counts how often the tensor was made before. Consecutive stays in the same
    `place` share its bytes: the later one overwrote the earlier, which its maker still reads.
    """

    tensor: str
    nbytes: int
    first: int
    last: int
    made: bool
    uses: tuple[int, ...]
    place: int
    copy: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """The runs of a step in order, and every stay of every tensor that owns memory.

    `away` are the stays in a tier outside the device's memory, from store to last load; only `away_bytes`
    counts them. Transfers are ops of the graph.
    """

    graph: Graph
    runs: tuple[OpRun, ...]
    stays: tuple[Stay, ...]
    away: tuple[Stay, ...] = ()

    def curve_bytes(self) -> NDArray[np.int64]:
        """Bytes alive during each run."""
        return self._curve_of(self.stays) + self._aside_bytes()

    def away_bytes(self) -> NDArray[np.int64]:
        """Bytes in the tier during each run."""
        return self._curve_of(self.away)

    def bytes_by_kind(self) -> dict[Kind, NDArray[np.int64]]:
        """The curve split by kind, for the kinds there are; what ops take aside counts as workspace."""
        stays: dict[Kind, list[Stay]] = {}
        for stay in self.stays:
            stays.setdefault(self.graph.tensors[stay.tensor].kind, []).append(stay)
        curves = {kind: self._curve_of(stays[kind]) for kind in Kind if kind in stays}
        aside = self._aside_bytes()
        if aside.any():
            curves[Kind.WORKSPACE] = curves.get(Kind.WORKSPACE, 0) + aside
        return curves

    def _aside_bytes(self) -> NDArray[np.int64]:
        return np.array([run.aside_bytes for run in self.runs], dtype=np.int64)

    def _curve_of(self, stays: Sequence[Stay]) -> NDArray[np.int64]:
        change = np.zeros(len(self.runs) + 1, dtype=np.int64)
        sizes = np.array([stay.nbytes for stay in stays], dtype=np.int64)
        np.add.at(change, np.array([stay.first for stay in stays], dtype=np.int64), sizes)
        np.subtract.at(change, np.array([stay.last + 1 for stay in stays], dtype=np.int64), sizes)
        curve: NDArray[np.int64] = np.cumsum(change[:-1])
        return curve


def timeline_of(graph: Graph, workspace_bytes: Mapping[str, int] = MappingProxyType({})) -> Timeline:
    """The graph run in its own order: every op once, nothing overwritten.

    `workspace_bytes` is the extra memory of kernels by op, beyond the tensors of the graph.
    """
    liveness = liveness_of(graph)
    aside = zip(graph.ops, liveness.temporary_bytes.tolist(), strict=True)
    runs = tuple(OpRun(op.id, aside_bytes=size + workspace_bytes.get(op.id, 0)) for op, size in aside)
    return Timeline(graph, runs, tuple(_stays_of(graph, liveness)))


def _stays_of(graph: Graph, liveness: Liveness) -> list[Stay]:
    storages = liveness.storages
    uses, made = _uses_by_storage(graph, liveness)
    return [
        Stay(owner, int(storages.nbytes[number]), int(first), int(last), number in made, uses[number], number)
        for number, (owner, first, last) in enumerate(
            zip(storages.owners, liveness.start, liveness.end, strict=True)
        )
        if first <= last and graph.tensors[owner].kind is not Kind.CONSTANT
    ]


def _uses_by_storage(graph: Graph, liveness: Liveness) -> tuple[list[tuple[int, ...]], set[int]]:
    """By storage the positions of the ops that use it; and the storages that some op makes."""
    number_of = liveness.storages.number_of
    uses: list[list[int]] = [[] for _ in liveness.storages.owners]
    made: set[int] = set()
    for position, op in enumerate(graph.ops):
        added = (use.tensor for use in op.outputs if use.role is Role.ACCUMULATE)
        for number in {number_of[name] for name in (*op.reads(), *added)}:
            uses[number].append(position)
        made.update(
            number_of[use.tensor]
            for use in op.outputs
            if use.role is Role.DATA and graph.tensors[use.tensor].alias_of is None
        )
    return [tuple(positions) for positions in uses], made


_SHARED = 0.5  # share of common ops below which the two are different steps


def curve_onto(axis: Timeline, other: Timeline) -> NDArray[np.int64]:
    """The curve of `other` on the runs of `axis`: for each run the most bytes alive since the run before."""
    position = {run.op: at for at, run in enumerate(other.runs) if run.doing is Doing.COMPUTE}
    shared = sum(run.op in position for run in axis.runs)
    if shared < _SHARED * max(len(axis.runs), len(position)):
        return stretched(other.curve_bytes(), len(axis.runs))
    stops, at = [], 0
    for run in axis.runs:
        if run.doing is Doing.COMPUTE:
            at = max(at, position.get(run.op, at))
        stops.append(at)
    return _highest_between(stops, other.curve_bytes())


def stretched(curve: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """A curve of any length over `length` runs, as if both went through their steps evenly."""
    stops = [max(0, (at + 1) * len(curve) // length - 1) for at in range(length)]
    return _highest_between(stops, curve)


def timed_onto(
    durations: Sequence[float], curve: NDArray[np.int64], seconds: Sequence[float]
) -> NDArray[np.int64]:
    """A curve with the time of each value, over runs that take `durations`, scaled to the same length."""
    ends = np.cumsum(np.maximum(durations, 0.0))
    if not len(curve) or not len(ends) or not ends[-1]:
        return stretched(curve, len(durations))
    times = np.array(seconds) - seconds[0]
    stops = np.searchsorted(times, ends / ends[-1] * times[-1], side="right") - 1
    stops[-1] = len(curve) - 1
    return _highest_between(stops.tolist(), curve)


def _highest_between(stops: Sequence[int], curve: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each stop the highest value after the previous stop, up to and including its own."""
    if not len(curve):
        return np.zeros(len(stops), dtype=np.int64)
    begins = [0, *(min(before + 1, stop) for before, stop in pairwise(stops))]
    highest = [curve[begin : stop + 1].max() for begin, stop in zip(begins, stops, strict=False)]
    return np.array(highest, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Offsets:
    """Offsets by stay (None where no place is known) and, for workspace, by run.

    `segments` are those of an allocator, with offsets in place of addresses.
    """

    offsets: tuple[int | None, ...]
    aside_offsets: Mapping[int, int]
    nbytes: int
    recorded: bool
    segments: tuple[Reserved, ...] = ()


def packed_arena(timeline: Timeline) -> Offsets:
    """One arena for the whole step; stays in one place keep one address."""
    aside = [
        PackedBlock(f"aside {n}", r.aside_bytes, n, n) for n, r in enumerate(timeline.runs) if r.aside_bytes
    ]
    packing = pack([*_blocks_of(timeline), *aside])
    return Offsets(
        offsets=tuple(packing.offsets[str(stay.place)] for stay in timeline.stays),
        aside_offsets={block.start: packing.offsets[block.id] for block in aside},
        nbytes=packing.arena_bytes,
        recorded=False,
    )


def _blocks_of(timeline: Timeline) -> list[PackedBlock]:
    """A block per place, over all the stays that follow one another in it."""
    stays: dict[int, list[Stay]] = {}
    for stay in timeline.stays:
        stays.setdefault(stay.place, []).append(stay)
    return [
        PackedBlock(str(place), there[0].nbytes, min(s.first for s in there), max(s.last for s in there))
        for place, there in stays.items()
    ]


def recorded_arena(timeline: Timeline, allocation: Allocation) -> Offsets:
    """The addresses of a run, without the gaps that no tensor and no segment touches: they are most of it."""
    known = [allocation.places.get(stay.tensor) for stay in timeline.stays]
    segments = allocation.segments
    shown = sorted((*(place for place in known if place is not None), *(held[:2] for held in segments)))
    offset_of: dict[int, int] = {}
    reach = used = 0
    for address, nbytes in shown:
        used += max(0, address + nbytes - max(address, reach))
        reach = max(reach, address + nbytes)
        offset_of[address] = used - (reach - address)
    return Offsets(
        tuple(offset_of[place[0]] if place else None for place in known),
        {},
        used,
        recorded=True,
        segments=tuple(held._replace(address=offset_of[held.address]) for held in segments),
    )
