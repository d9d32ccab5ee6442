"""From which op to which op each storage must exist, in the graph's own order."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stowplan.analyse.storages import Storages, is_resident, storages_of
from stowplan.ir import Graph, Role
from stowplan.ops.aliasing import aliasing_of
from stowplan.ops.table import site_of


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
