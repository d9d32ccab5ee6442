"""Tiles plug in here: candidates for a graph of which nothing but its file is known, and tiles to look at.

Sweeps are priced by the region algebra.

The tiles of a segment level by level, as a schedule from a file has them too.

Tiles to compare with the file's tiles: the same network, in tiles that take no more memory.
"""

from collections.abc import Iterator
from itertools import islice, product
from math import prod

from stowplan.analyse.tile_costs import Levels, Read, TileOp
from stowplan.errors import NotTileable
from stowplan.geometry import Point, Rect
from stowplan.ir import Document, Graph, Kind, TileSchedule, TileStep
from stowplan.ops.effects import macs_of
from stowplan.ops.table import shape_of, site_of
from stowplan.plan.level import Level as PartLevel
from stowplan.plan.options import PlanOptions
from stowplan.plan.pricing import Pricing
from stowplan.plan.select import GRAPH_CANDIDATES, Baseline, Candidate, Refusals
from stowplan.plan.tile_map import DOCUMENT_TILES, TILE_LEVELS, TileMap
from stowplan.techniques.tiles.plan import rects
from stowplan.techniques.tiles.plan.borders import in_tiling_order
from stowplan.techniques.tiles.plan.by_sample import sample_candidates
from stowplan.techniques.tiles.plan.candidates import Tiled
from stowplan.techniques.tiles.plan.collapse import extra_macs_of, name_of_sweep
from stowplan.techniques.tiles.plan.collapsed import stage_candidates, whole_candidates
from stowplan.techniques.tiles.plan.costs import costs_of_sweep
from stowplan.techniques.tiles.plan.cutout import segment_in
from stowplan.techniques.tiles.plan.mapping import tile_map_of
from stowplan.techniques.tiles.plan.rounds import rounds_of
from stowplan.techniques.tiles.plan.segment import Segment, segment_of


def levels_of(tiled: TileMap, most: int | None = None) -> Levels:
    """By place in the grid the levels of its tile, from the first op to the last; of `most` tiles at most."""
    segment = segment_in(tiled.text)
    macs = {op.id: macs_of(site_of(segment.graph, op)) for op in segment.ops}
    places = product(*map(range, tiled.parts))
    tiles = islice(rects.tiles_of(segment, tiled.parts), most)
    return {
        place: tuple(_level(segment, tiled.parts, place, level, macs[level.op.id]) for level in tile.levels)
        for place, tile in zip(places, tiles, strict=False)
    }


def _level(segment: Segment, parts: Point, place: Point, level: PartLevel, macs: int) -> TileOp:
    shape = shape_of(segment.graph.tensors[level.op.outputs[level.output].tensor])
    share = macs * level.made.volume // max(1, prod(shape))
    return TileOp(level.op.id, shape, level.made, tuple(_reads(segment, parts, place, level)), share)


def _reads(segment: Segment, parts: Point, place: Point, level: PartLevel) -> Iterator[Read]:
    """The parts that a level reads, without parameters, which every tile reads whole."""
    for use, wanted in zip(level.op.inputs, level.needs, strict=True):
        tensor = segment.graph.tensors[use.tensor]
        if wanted is not None and wanted.ndim and tensor.kind not in (Kind.PARAMETER, Kind.BUFFER):
            shape = shape_of(tensor)
            yield Read(shape, wanted, wanted.clip(shape), _cell(shape, parts, place))


def _cell(shape: Point, parts: Point, place: Point) -> Rect | None:
    """The tile's share of a tensor that can be cut by the same grid."""
    if len(shape) != len(parts) or any(n > size for n, size in zip(parts, shape, strict=True)):
        return None
    cuts = tuple(zip(shape, parts, place, strict=True))
    low = tuple(size * index // n for size, n, index in cuts)
    return Rect(low, tuple(size * (index + 1) // n for size, n, index in cuts))


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


TILE_LEVELS.register("tile")(levels_of)
DOCUMENT_TILES.register("tile")(tiles_for_document)


@GRAPH_CANDIDATES.register("tile")
def graph_candidates(
    graph: Graph, pricing: Pricing, baseline: Baseline, options: PlanOptions, refusals: Refusals
) -> Iterator[Candidate]:
    """The whole step in tiles, then sample by sample, else stage by stage."""
    if graph.has_backward:
        early = in_tiling_order(graph)
        yield from whole_candidates(early, pricing, baseline, options, refusals)
        by_sample = tuple(sample_candidates(early, pricing, baseline, options, refusals))
        yield from by_sample or stage_candidates(early, pricing, baseline, options, refusals)
