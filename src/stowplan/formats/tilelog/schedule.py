"""Which regions each tile needs, by the windows' formulas alone.

Backward starts at the disjoint part of the input that a tile owns and asks, op by op, where its gradient
comes from. Forward starts at the output region this ends with and asks, from the last op to the first, what
it is made from.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from stowplan.formats.tilelog.network import Stage, stages_of
from stowplan.geometry import Point, Rect
from stowplan.ir import Graph, TileSchedule, TileStep
from stowplan.ops.sliding import pull, reach


def tile_schedule(graph: Graph, grid: Point) -> TileSchedule:
    """The steps of every tile when the chain's input is cut evenly into a grid of (rows, columns)."""
    owned = Rect.of_shape(stages_of(graph)[0].inputs).split(grid)
    coords = product(*map(range, grid))
    return schedule_of(graph, grid, dict(zip(coords, owned, strict=True)))


def schedule_of(graph: Graph, grid: Point, owned: Mapping[Point, Rect]) -> TileSchedule:
    """The steps of every tile, given the part of the input it owns. Backward runs in reverse tile order."""
    stages = stages_of(graph)
    backward = {coord: tuple(_backward(stages, rect)) for coord, rect in owned.items()}
    forward = {coord: tuple(_forward(stages, steps[-1].inside)) for coord, steps in backward.items()}
    return TileSchedule(grid, forward, dict(reversed(backward.items())))


def _backward(stages: Sequence[Stage], rect: Rect) -> Iterator[TileStep]:
    for stage in stages:
        wanted = reach(stage.windows, rect)
        inside = wanted.clip(stage.outputs)
        yield TileStep(stage.op.id, rect, wanted, inside)
        rect = inside


def _forward(stages: Sequence[Stage], rect: Rect) -> Iterator[TileStep]:
    for stage in reversed(stages):
        wanted = pull(stage.windows, rect)
        inside = wanted.clip(stage.inputs)
        yield TileStep(stage.op.id, rect, wanted, inside)
        rect = inside
