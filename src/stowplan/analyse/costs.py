"""The cost of a step: multiply-accumulates, bytes moved and estimated workspace, per op and in total."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stowplan.errors import InvalidGraph
from stowplan.ir import Graph, Phase
from stowplan.ops.macs import macs_of, traffic_of
from stowplan.ops.table import site_of
from stowplan.ops.workspace import workspace_of


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
