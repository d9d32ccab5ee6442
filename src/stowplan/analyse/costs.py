"""What a step takes: multiply-accumulates and bytes moved, per op and in all."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stowplan.ir import Graph, Phase
from stowplan.ops.macs import macs_of
from stowplan.ops.table import site_of
from stowplan.ops.traffic import traffic_of


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
    macs = np.array([macs_of(site) for site in sites], dtype=np.int64)
    traffic = np.array([traffic_of(site) for site in sites], dtype=np.int64)
    forward = np.array([op.phase is Phase.FORWARD for op in graph.ops], dtype=bool)
    return Costs(macs, traffic, int(macs[forward].sum()), int(macs.sum()))
