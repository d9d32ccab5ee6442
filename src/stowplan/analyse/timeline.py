"""Timeline: what runs when, and which bytes are there meanwhile. Graphs and plans both have one.

Time is counted in runs: one execution of one op, or the beginning of one transfer. Constants are left out, as
everywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from stowplan.analyse.liveness import Liveness, liveness_of
from stowplan.ir import Graph, Kind, Role


class Doing(StrEnum):
    """Why an op runs."""

    COMPUTE = "compute"  # for the first time
    AGAIN = "again"  # because something it made was let go of
    STORE = "store"  # to write a tensor to a tier
    LOAD = "load"  # to read it back

    @property
    def is_transfer(self) -> bool:
        """Whether it goes on beside the ops."""
        return self in (Doing.STORE, Doing.LOAD)


@dataclass(frozen=True, slots=True)
class Run:
    """One execution of an op. `aside_bytes` is what it takes besides tensors while it runs."""

    op: str
    doing: Doing = Doing.COMPUTE
    aside_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Stay:
    """One copy of a tensor in memory from run `first` to run `last`, both included.

    `made` is False for what was there before the step. `uses` are the runs that read it or add into it, also
    through views. `copy` counts how often the tensor had been made before. Stays that follow one another in
    the same `place` share its bytes: the later was written over the earlier, which its maker still reads.
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

    `away` are the stays in a tier outside of the device's memory, from store to last load. They count in no
    curve but their own. Transfers are ops of the graph.
    """

    graph: Graph
    runs: tuple[Run, ...]
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

    `workspace_bytes` is what kernels take while they run, by op, beyond the tensors of the graph.
    """
    liveness = liveness_of(graph)
    aside = zip(graph.ops, liveness.temporary_bytes.tolist(), strict=True)
    runs = tuple(Run(op.id, aside_bytes=size + workspace_bytes.get(op.id, 0)) for op, size in aside)
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
