"""What a tile schedule costs over computing its segment whole: tiles that overlap do work twice."""

from dataclasses import dataclass
from math import prod

from stowplan.errors import InvalidGraph
from stowplan.ir import Graph, Op, TileSchedule, TileStep
from stowplan.ops.macs import macs_of
from stowplan.ops.table import shape_of, site_of


@dataclass(frozen=True, slots=True)
class TileCosts:
    """The forward half of a schedule: its work, and how often it writes the cells of the segment's output."""

    tiles: int
    forward_macs: int
    untiled_macs: int
    writes: int
    cells: int


def tile_costs_of(graph: Graph, schedule: TileSchedule) -> TileCosts:
    """Sum over all tiles what each step makes; a step takes its op's work by its share of the op's output."""
    steps = [step for tile in schedule.forward.values() for step in tile]
    ops = _ops_of(graph, steps)
    last = {tile[0].op for tile in schedule.forward.values() if tile}  # steps go from the last op back
    return TileCosts(
        tiles=len(schedule.forward),
        forward_macs=sum(_macs(graph, ops[step.op], step) for step in steps),
        untiled_macs=sum(macs_of(site_of(graph, op)) for op in ops.values()),
        writes=sum(step.result.volume for step in steps if step.op in last),
        cells=sum(_cells(graph, ops[name], len(schedule.grid)) for name in last),
    )


def _ops_of(graph: Graph, steps: list[TileStep]) -> dict[str, Op]:
    named = {step.op for step in steps}
    ops = {op.id: op for op in graph.ops if op.id in named and op.outputs}
    for name in named - ops.keys():
        raise InvalidGraph(f"a tile computes {name!r}, but the graph has no such op with an output")
    return ops


def _macs(graph: Graph, op: Op, step: TileStep) -> int:
    return macs_of(site_of(graph, op)) * step.result.volume // _cells(graph, op, step.result.ndim)


def _cells(graph: Graph, op: Op, tiled_dims: int) -> int:
    """How many cells the output of an op has in its trailing dims, those that tiles divide."""
    return max(1, prod(shape_of(graph.tensors[op.outputs[0].tensor])[-tiled_dims:]))
