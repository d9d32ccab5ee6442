"""Facts that follow from a graph: storages, their lifetimes, costs, the peak and its lower bound.

Tensors that alias each other share one storage. A storage exists from the op that makes it to the last op
that needs it, in the graph's own order. Costs are multiply-accumulates, bytes moved and estimated workspace.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stowplan.errors import InvalidGraph
from stowplan.ir import Graph, Kind, Phase, Role, Tensor
from stowplan.ops.effects import aliasing_of, macs_of, traffic_of
from stowplan.ops.table import site_of
from stowplan.ops.workspace import workspace_of


@dataclass(frozen=True, slots=True)
class Storages:
    """Every storage by number: the tensor that owns it, its bytes, and which tensors live in it."""

    owners: tuple[str, ...]
    nbytes: NDArray[np.int64]
    number_of: Mapping[str, int]  # tensor id -> storage number


def storages_of(graph: Graph) -> Storages:
    """Follow every alias to the tensor that owns the storage."""
    owners = tuple(name for name, tensor in graph.tensors.items() if tensor.alias_of is None)
    number = {owner: position for position, owner in enumerate(owners)}
    sizes = np.zeros(len(owners), dtype=np.int64)
    for owner, position in number.items():
        nbytes = graph.tensors[owner].nbytes
        if nbytes is None:
            raise InvalidGraph(
                f"the bytes of tensor {owner!r} are not known, so its memory cannot be counted"
            )
        sizes[position] = nbytes
    number_of = number | {name: number[graph.storage_of(name)] for name in graph.tensors}  # owners first
    return Storages(owners, sizes, number_of)


def is_resident(tensor: Tensor) -> bool:
    """Whether the tensor is there before, during and after every step."""
    return tensor.kind in (Kind.PARAMETER, Kind.BUFFER, Kind.CONSTANT)


@dataclass(frozen=True, slots=True)
class Liveness:
    """First and last op position (inclusive) at which each storage exists; start > end: never.

    `temporary_bytes` is extra memory of each op: a second contribution to a gradient is computed separately
    before it is added.
    """

    storages: Storages
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    temporary_bytes: NDArray[np.int64]


def liveness_of(graph: Graph, *, in_place: bool = False) -> Liveness:
    """Lifetimes under the rules of the design; `in_place` lets an op overwrite an input that dies there."""
    storages = storages_of(graph)
    number_of = storages.number_of
    never = len(graph.ops)
    start, end = [never] * len(storages.owners), [-1] * len(storages.owners)
    temporary = [0] * len(graph.ops)
    produced: set[str] = set()
    for position, op in enumerate(graph.ops):
        for use in op.outputs:
            number = number_of[use.tensor]
            start[number] = min(start[number], position)
            end[number] = position
            produced.add(use.tensor)
            if use.role is Role.ACCUMULATE:
                temporary[position] += int(storages.nbytes[number])
        for name in op.reads():
            end[number_of[name]] = position
    for name, tensor in graph.tensors.items():
        if name not in produced:
            start[number_of[name]] = 0
        if is_resident(tensor) or name in graph.held:
            end[number_of[name]] = never - 1
    starts, ends = np.array(start, dtype=np.int64), np.array(end, dtype=np.int64)
    liveness = Liveness(storages, starts, ends, np.array(temporary, dtype=np.int64))
    return _overwriting(graph, liveness) if in_place else liveness


def _overwriting(graph: Graph, separate: Liveness) -> Liveness:
    """Let outputs reuse the storage of an input that dies at their op, where the op allows it."""
    storages, start, end = separate.storages, separate.start.copy(), separate.end.copy()
    moved = list(range(len(storages.owners)))  # storage number -> the storage it lives in

    for position, op in enumerate(graph.ops):
        site = site_of(graph, op)
        for output, candidates in aliasing_of(site).in_place_of.items():
            target = moved[storages.number_of[site.outputs[output].id]]
            for candidate in candidates:
                victim = moved[storages.number_of[site.inputs[candidate].id]]
                dies_here = end[victim] == position and not is_resident(site.inputs[candidate])
                if victim != target and dies_here and storages.nbytes[victim] >= storages.nbytes[target]:
                    moved[target] = victim
                    end[victim] = end[target]
                    start[target], end[target] = len(graph.ops), -1
                    break
    return Liveness(storages, start, end, separate.temporary_bytes)


@dataclass(frozen=True, slots=True)
class Costs:
    """Per op, in the graph's order."""

    macs: NDArray[np.int64]
    traffic_bytes: NDArray[np.int64]
    forward_macs: int
    step_macs: int


def costs_of(graph: Graph) -> Costs:
    """Ask the tables of `ops/` about every op."""
    sites = [site_of(graph, op) for op in graph.ops]
    macs = [macs_of(site) for site in sites]
    traffic = [traffic_of(site) for site in sites]
    forward = sum(count for op, count in zip(graph.ops, macs, strict=True) if op.phase is Phase.FORWARD)
    return Costs(_counted(macs, graph), _counted(traffic, graph), forward, sum(macs))


def _counted(counts: Sequence[int], graph: Graph) -> NDArray[np.int64]:
    try:
        return np.array(counts, dtype=np.int64)
    except OverflowError:
        largest = max(range(len(counts)), key=counts.__getitem__)
        what = (
            f"op {graph.ops[largest].id!r} would take {float(counts[largest]):.3g} multiplications or bytes"
        )
        raise InvalidGraph(f"{what}, more than any machine has: one of its shapes is wrong") from None


def estimated_workspaces(graph: Graph) -> dict[str, int]:
    """Bytes by op id, from the table: an estimate."""
    return {op.id: workspace_of(site_of(graph, op)) for op in graph.ops}


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
