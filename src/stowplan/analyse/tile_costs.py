"""The cost of a tile schedule: the extra work of overlapping tiles, and each tile op by op."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from stowplan.errors import InvalidGraph
from stowplan.geometry import Point, Rect
from stowplan.ir import Graph, Op, Shape, TileSchedule, TileStep
from stowplan.ops.effects import macs_of
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
    """Sum the work of all tiles; a step takes its op's work by its share of the op's output."""
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


@dataclass(frozen=True, slots=True)
class Read:
    """The region a tile reads of one tensor, and the part `inside` the tensor: the rest is padding.

    `owned` is the tile's own cell of the tensor, None if the tensor is not cut as the tiles are.
    """

    shape: Shape
    wanted: Rect
    inside: Rect
    owned: Rect | None

    @property
    def halo_cells(self) -> int:
        """How many cells are read that other tiles own."""
        return 0 if self.owned is None else self.inside.volume - self.inside.intersect(self.owned).volume


@dataclass(frozen=True, slots=True)
class TileOp:
    """One op of one tile: the region it makes and its reads. `macs` is known for the forward half only."""

    op: str
    made_shape: Shape
    made: Rect
    reads: tuple[Read, ...]
    macs: int | None

    @property
    def halo_cells(self) -> int:
        """How many cells are read that other tiles own."""
        return sum(read.halo_cells for read in self.reads)


Levels: TypeAlias = Mapping[Point, tuple[TileOp, ...]]  # by tile, in the order of the schedule's steps


def forward_levels(graph: Graph, schedule: TileSchedule) -> Levels:
    """The levels of every tile's forward half, from the last op to the first."""
    ops = _tiled_ops(graph)
    return {
        tile: tuple(_forward_level(graph, ops, schedule.grid, tile, step) for step in steps)
        for tile, steps in schedule.forward.items()
    }


def backward_levels(graph: Graph, schedule: TileSchedule) -> Levels:
    """The levels of every tile's backward half, from the first op to the last."""
    ops = _tiled_ops(graph)
    return {
        tile: tuple(_backward_level(graph, ops, schedule.grid, tile, step) for step in steps)
        for tile, steps in schedule.backward.items()
    }


def _tiled_ops(graph: Graph) -> dict[str, Op]:
    return {op.id: op for op in graph.ops if op.inputs and op.outputs}


def _forward_level(graph: Graph, ops: dict[str, Op], grid: Shape, tile: Point, step: TileStep) -> TileOp:
    read, made = _shapes(graph, ops, step, len(grid))
    whole = macs_of(site_of(graph, ops[step.op]))
    macs = whole * step.result.volume // max(1, prod(made))
    return _level(step, made, read, _cell(read, grid, tile), macs)


def _backward_level(graph: Graph, ops: dict[str, Op], grid: Shape, tile: Point, step: TileStep) -> TileOp:
    made, read = _shapes(graph, ops, step, len(grid))
    return _level(step, made, read, _cell(read, grid, tile), None)


def _level(step: TileStep, made: Shape, read: Shape, owned: Rect, macs: int | None) -> TileOp:
    """Shapes are those of the tiled dims."""
    return TileOp(step.op, made, step.result, (Read(read, step.wanted, step.inside, owned),), macs)


def _shapes(graph: Graph, ops: dict[str, Op], step: TileStep, tiled_dims: int) -> tuple[Shape, Shape]:
    """The tiled dims of what the op reads and of what it makes."""
    if step.op not in ops:
        raise InvalidGraph(f"a tile computes {step.op!r}, but the graph has no such op with an output")
    op = ops[step.op]
    read, made = (shape_of(graph.tensors[use.tensor]) for use in (op.inputs[0], op.outputs[0]))
    rects = (step.result, step.wanted, step.inside)
    if min(len(read), len(made)) < tiled_dims or any(rect.ndim != tiled_dims for rect in rects):
        raise InvalidGraph(f"a tile of {step.op!r} has not the {tiled_dims} dims of its grid")
    return read[-tiled_dims:], made[-tiled_dims:]


def _cell(shape: Shape, grid: Shape, tile: Point) -> Rect:
    """The tile's cell if the tensor is cut as evenly as its grid can."""
    if len(tile) != len(grid) or min(grid, default=0) < 1:
        raise InvalidGraph(f"tile {tile} does not lie in a grid of {grid}")
    cuts = tuple(zip(shape, grid, tile, strict=True))
    low = tuple(size * index // parts for size, parts, index in cuts)
    high = tuple(size * (index + 1) // parts for size, parts, index in cuts)
    return Rect(low, high)
