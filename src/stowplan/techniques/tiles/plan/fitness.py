"""Can a segment be computed on this grid? If not, the first reason why."""

from collections.abc import Iterable, Mapping, Sequence

from stowplan.errors import NotTileable
from stowplan.ir import Op
from stowplan.ops.regions import Partial
from stowplan.ops.statistics import GROUP_NORM
from stowplan.ops.table import registered_types, shape_of
from stowplan.ops.tiling import Part, Refusal
from stowplan.techniques.tiles.plan.rects import Grid, TileLevels, cut_tensors, grid_of
from stowplan.techniques.tiles.plan.segment import Segment, reduction_of


def fitting_tiles(segment: Segment, parts: Sequence[int]) -> Grid:
    """The tiles of the grid; NotTileable says why, if one cannot be computed on its own.

    One tile of each kind is asked, and all of them where an op has a rule of the user's: that may look at
    where in a tensor a part lies.
    """
    if refusal := _of_the_whole(segment, parts):
        raise NotTileable(refusal)
    grid = grid_of(segment, parts)
    has_own = any(op.type in registered_types for op in segment.ops)
    refuse_tiles(segment, grid if has_own else [tile for tile, _ in grid.kinds])
    return grid


def refuse_tiles(segment: Segment, tiles: Iterable[TileLevels]) -> None:
    """NotTileable says why, if one of the tiles cannot be computed on its own."""
    rules = {op.id: segment.refusal(op) for op in segment.ops if op.id not in segment.known}
    for tile in tiles:
        if refusal := _of_a_tile(segment, tile, rules):
            raise NotTileable(refusal)


def _of_the_whole(segment: Segment, parts: Sequence[int]) -> str:
    graph = segment.graph
    if not segment.outputs:
        return "nothing outside reads what the segment makes"
    shapes = {name: shape_of(graph.tensors[name]) for name in cut_tensors(segment)}
    for name, shape in shapes.items():
        if len(shape) != len(parts):
            cut = "x".join(map(str, parts))
            return f"{name} of shape {shape} and the other outputs cannot be cut alike, as {cut}"
    if segment.loss is None:
        return ""
    reduction = reduction_of(graph, segment.loss)
    reduced = reduction.dims[0] if reduction else ()
    if reduction is None or reduction.partial not in (Partial.SUM, Partial.MEAN):
        return f"{segment.loss.id} is neither a sum nor a mean over its tiles"
    if any(n > 1 and dim not in reduced for dim, n in enumerate(parts)):
        return f"{segment.loss.id} runs over dims {reduced} alone"
    return ""


def cuts_channels(segment: Segment, op: Op, tile: TileLevels) -> bool:
    """Whether an op takes statistics over channels of which the tile has some."""
    source = op.inputs[0].tensor
    if op.type != GROUP_NORM or source not in tile.held:
        return False
    return tile.held[source].shape[1] != shape_of(segment.graph.tensors[source])[1]


def channels_are_cut(op: Op) -> str:
    """That, in words."""
    return f"{op.id} takes its statistics over channels, of which a tile has some"


def _of_a_tile(segment: Segment, tile: TileLevels, rules: Mapping[str, Refusal]) -> str:
    for level in tile.levels:
        rule = rules.get(level.op.id)
        if rule and (reason := rule(Part(level.output, level.made, level.needs))):
            return reason
    known = (op for op in segment.ops if op.id in segment.known)
    if cut := next((op for op in known if cuts_channels(segment, op, tile)), None):
        return channels_are_cut(cut)
    made = {level.op.outputs[level.output].tensor for level in tile.levels}.union(segment.inputs)
    missing = [name for name in tile.owned if segment.loss is None and name not in made]
    return f"{missing[0]} is an output that no tile makes" if missing else ""
