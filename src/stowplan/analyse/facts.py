"""Facts: the memory of a step by kind, its peak, and the lower bound without tiles."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stowplan.analyse.costs import Costs, costs_of
from stowplan.analyse.liveness import Liveness, liveness_of
from stowplan.analyse.storages import Storages, is_resident
from stowplan.ir import Graph, Kind


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes alive at once, the op running then, and the tensors alive, largest first."""

    bytes: int
    op: str
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that follow from a graph. Curve and peak exclude the bytes of constants."""

    liveness: Liveness
    curve_bytes: NDArray[np.int64]
    peak: Peak
    lower_bound_bytes: int
    bytes_by_kind: Mapping[Kind, int]
    costs: Costs


def facts_of(graph: Graph, *, in_place: bool = False) -> Facts:
    """All facts of a graph whose bytes are known."""
    liveness = liveness_of(graph, in_place=in_place)
    curve = memory_curve(graph, liveness)
    return Facts(
        liveness=liveness,
        curve_bytes=curve,
        peak=_peak_of(graph, liveness, curve),
        lower_bound_bytes=untiled_bound(graph, liveness),
        bytes_by_kind=_bytes_by_kind(graph, liveness.storages),
        costs=costs_of(graph),
    )


def memory_curve(graph: Graph, liveness: Liveness) -> NDArray[np.int64]:
    """Bytes alive while each op runs, with its operands, results and temporaries."""
    storages = liveness.storages
    counted = [
        number
        for number, owner in enumerate(storages.owners)
        if graph.tensors[owner].kind is not Kind.CONSTANT and liveness.start[number] <= liveness.end[number]
    ]
    change = np.zeros(len(graph.ops) + 1, dtype=np.int64)
    np.add.at(change, liveness.start[counted], storages.nbytes[counted])
    np.subtract.at(change, liveness.end[counted] + 1, storages.nbytes[counted])
    curve: NDArray[np.int64] = np.cumsum(change[:-1]) + liveness.temporary_bytes
    return curve


def _peak_of(graph: Graph, liveness: Liveness, curve: NDArray[np.int64]) -> Peak:
    if not len(curve):
        return Peak(0, "", ())
    position = int(np.argmax(curve))
    alive = np.flatnonzero((liveness.start <= position) & (position <= liveness.end))
    by_size = sorted(alive.tolist(), key=lambda number: (-int(liveness.storages.nbytes[number]), number))
    owners = (liveness.storages.owners[number] for number in by_size)
    names = tuple(name for name in owners if graph.tensors[name].kind is not Kind.CONSTANT)
    return Peak(int(curve[position]), graph.ops[position].id, names)


def untiled_bound(graph: Graph, liveness: Liveness) -> int:
    """Resident bytes plus the operands and results of one op: without tiles, no schedule needs less."""
    storages = liveness.storages
    made = {name for op in graph.ops for name in op.writes()}
    standing = {
        storages.number_of[name]
        for name, tensor in graph.tensors.items()
        if is_resident(tensor) or (name in graph.held and name not in made)
    }
    constant = {
        storages.number_of[name] for name, tensor in graph.tensors.items() if tensor.kind is Kind.CONSTANT
    }
    sizes = storages.nbytes
    largest = 0
    for op in graph.ops:
        touched = {storages.number_of[name] for name in (*op.reads(), *op.writes())}
        largest = max(largest, sum(int(sizes[number]) for number in touched - standing))
    return largest + sum(int(sizes[number]) for number in standing - constant)


def _bytes_by_kind(graph: Graph, storages: Storages) -> dict[Kind, int]:
    totals = dict.fromkeys(Kind, 0)
    for owner, size in zip(storages.owners, storages.nbytes.tolist(), strict=True):
        totals[graph.tensors[owner].kind] += size
    return totals
