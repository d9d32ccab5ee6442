"""Tiles to compare with the file's tiles: the same network, in tiles that take no more memory."""

from itertools import product
from math import prod

from stowplan.errors import NotTileable
from stowplan.ir import Document, Graph, TileSchedule, TileStep
from stowplan.ops.table import shape_of
from stowplan.plan.tile_map import TileMap
from stowplan.plan.tiles.candidates import Tiled
from stowplan.plan.tiles.collapse import extra_macs_of, name_of_sweep
from stowplan.plan.tiles.costs import costs_of_sweep
from stowplan.plan.tiles.mapping import tile_map_of
from stowplan.plan.tiles.rounds import rounds_of
from stowplan.plan.tiles.segment import Segment, segment_of

_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)  # of parts along a dim that are tried


def tiles_for_document(document: Document) -> TileMap | None:
    """The grid with the least work among those whose tiles fit; None if there are none."""
    schedule = document.tiles
    if schedule is None:
        return None
    named = {step.op for steps in schedule.forward.values() for step in steps}
    segment = segment_of(document.graph, [op.id for op in document.graph.ops if op.id in named])
    theirs = tile_bytes(document.graph, schedule)
    fitting = [t for t in _tried(segment, schedule) if t.costs.forward_peak_bytes <= theirs]
    best = min(fitting, key=lambda t: (t.costs.forward_macs, t.costs.tiles), default=None)
    if best is None:
        return None
    extra = extra_macs_of(segment, best.costs)
    return tile_map_of(segment, best.parts, best.costs, sweep=name_of_sweep(segment), extra_macs=extra)


def tile_bytes(graph: Graph, schedule: TileSchedule) -> int:
    """What the largest tile of a schedule holds at once: what a step makes, and what it reads of the step
    before."""
    return max((_step_bytes(graph, step) for steps in schedule.forward.values() for step in steps), default=0)


def _step_bytes(graph: Graph, step: TileStep) -> int:
    op = next(op for op in graph.ops if op.id == step.op)
    made, read = (graph.tensors[use.tensor] for use in (op.outputs[0], op.inputs[0]))
    itemsize = made.dtype.itemsize if made.dtype else 4
    others = prod(shape_of(made)[: -step.result.ndim]), prod(shape_of(read)[: -step.inside.ndim])
    from_step = any(read.id in other.writes() for other in graph.ops)
    return itemsize * (others[0] * step.result.volume + from_step * others[1] * step.inside.volume)


def _tried(segment: Segment, schedule: TileSchedule) -> list[Tiled]:
    shape = shape_of(segment.graph.tensors[segment.outputs[0]])
    leading = (1,) * (len(shape) - len(schedule.grid))
    found = []
    for grid in product(*([n for n in _COUNTS if n <= size] for size in shape[len(leading) :])):
        try:
            parts = (*leading, *grid)
            found.append(Tiled(segment, parts, costs_of_sweep(segment, rounds_of(segment, parts))))
        except NotTileable:
            continue
    return found
