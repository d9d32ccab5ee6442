"""The tiles of a segment level by level, as a schedule from a file has them too."""

from collections.abc import Iterator
from itertools import islice, product
from math import prod

from stowplan.analyse.tile_costs import Level, Levels, Read
from stowplan.geometry import Point, Rect
from stowplan.ir import Kind
from stowplan.ops.macs import macs_of
from stowplan.ops.table import shape_of, site_of
from stowplan.plan.level import Level as PartLevel
from stowplan.plan.tile_map import TileMap
from stowplan.plan.tiles import rects
from stowplan.plan.tiles.cutout import segment_in
from stowplan.plan.tiles.segment import Segment


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


def _level(segment: Segment, parts: Point, place: Point, level: PartLevel, macs: int) -> Level:
    shape = shape_of(segment.graph.tensors[level.op.outputs[level.output].tensor])
    share = macs * level.made.volume // max(1, prod(shape))
    return Level(level.op.id, shape, level.made, tuple(_reads(segment, parts, place, level)), share)


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
