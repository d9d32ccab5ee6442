"""Which segments on which grids are worth a look: a handful, from none to every stage that has much inside.

Stages end where little is handed on. A stage is cut finer until a tile is small against it, samples first:
cutting between samples costs nothing. The stages that hold most are tiled first. Where the whole forward half
can be cut up to its loss, running sample by sample is one more way, and needs no recomputation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from stowplan.errors import BadUse
from stowplan.ir import Graph, Kind, Op, Phase
from stowplan.ops.table import shape_of
from stowplan.plan.tiles.costs import SweepCosts, costs_of_sweep
from stowplan.plan.tiles.fitness import fitting_tiles
from stowplan.plan.tiles.rects import cut_tensors
from stowplan.plan.tiles.segment import Segment, segment_of

_SMALL = 8  # a tile that takes this much less than its stage is small enough
_HALO = 0.35  # a stage whose tiles do so much twice is cut no finer
_STEEP = 0.8  # bytes handed on at the end of a stage, against the most inside it
_TILES = 256
_STAGES = 5
_WHOLE_GRIDS = 6


@dataclass(frozen=True, slots=True)
class Tiled:
    """A segment on a grid, and what that costs."""

    segment: Segment
    parts: tuple[int, ...]
    costs: SweepCosts


Tiling = tuple[Tiled, ...]


def stage_tilings(graph: Graph) -> Iterator[Tiling]:
    """Ways to tile some stages, from the one that holds most to all that can be."""
    stages = [tiled for stage in stages_of(graph) if (tiled := _tiled_stage(graph, stage))]
    sizes = sorted({_size(tiled) for tiled in stages}, reverse=True)
    for size in sizes[:_STAGES]:
        yield tuple(tiled for tiled in stages if _size(tiled) >= size)


def stages_of(graph: Graph) -> list[tuple[str, ...]]:
    """The forward half cut where the bytes that are handed on are fewest for a while."""
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    crossing = _crossing_bytes(graph, forward)
    stages, start = [], 0
    for place in range(1, len(forward) - 1):
        if _is_valley(crossing, start, place):
            stages.append(tuple(op.id for op in forward[start : place + 1]))
            start = place + 1
    return [*stages, tuple(op.id for op in forward[start:])]


def _is_valley(crossing: Sequence[int], start: int, place: int) -> bool:
    """Whether the bytes are well below the most of the stage, and rise well again before they fall."""
    here = crossing[place]
    rises = next((c > here for c in crossing[place + 1 :] if c < here or _STEEP * c > here), False)
    return here < _STEEP * max(crossing[start:place], default=0) and here < crossing[place - 1] and rises


def _crossing_bytes(graph: Graph, forward: Sequence[Op]) -> list[int]:
    """By op the bytes of what is made up to it and read after it in the forward half."""
    last: dict[str, int] = {}
    for place, op in enumerate(forward):
        for name in op.reads():
            last[name] = place
    change = [0] * (len(forward) + 1)
    for place, op in enumerate(forward):
        for name in op.writes():
            if name in last and graph.tensors[name].kind is Kind.ACTIVATION:
                change[place] += prod(shape_of(graph.tensors[name])) * 4
                change[last[name]] -= prod(shape_of(graph.tensors[name])) * 4
    totals = list[int]()
    for amount in change[:-1]:
        totals.append((totals[-1] if totals else 0) + amount)
    return totals


def _size(tiled: Tiled) -> int:
    """What the stage would hold if it were one tile, coarsely: twins are of one size."""
    inside = (tiled.segment.graph.tensors[name] for name in tiled.segment.inside)
    return sum(tensor.nbytes or 0 for tensor in inside if tensor.alias_of is None) >> 20


def _tiled_stage(graph: Graph, stage: tuple[str, ...]) -> Tiled | None:
    """The first grid with small tiles, or the last one before the halo is too much; None if none fits."""
    best: Tiled | None = None
    whole = 0
    try:
        segment = segment_of(graph, stage)
        for parts in _grids(segment):
            costs = costs_of_sweep(segment, fitting_tiles(segment, parts))
            whole = whole or costs.backward_peak_bytes
            if costs.halo_share > _HALO:
                break
            best = Tiled(segment, parts, costs) if costs.tiles > 1 else best
            if costs.backward_peak_bytes * _SMALL <= whole:
                break
    except BadUse:
        return best
    return best


def _grids(segment: Segment) -> Iterator[tuple[int, ...]]:
    """One tile, then one per sample, then finer along the largest other dim."""
    cut = cut_tensors(segment)
    if not cut:
        raise BadUse("not tiled: nothing comes out")
    shape = shape_of(segment.graph.tensors[cut[0]])
    parts = [1] * len(shape)
    yield tuple(parts)
    while prod(parts) < _TILES:
        dim = _next_dim(shape, parts)
        if dim is None:
            return
        parts[dim] = shape[0] if dim == 0 and len(shape) > 2 else min(shape[dim], parts[dim] * 2)
        yield tuple(parts)


def _next_dim(shape: tuple[int, ...], parts: Sequence[int]) -> int | None:
    """Samples first, then the dim whose tiles are longest; features stay together."""
    if not shape:
        return None
    if parts[0] == 1 < shape[0]:
        return 0
    features = {1} if len(shape) > 3 else {len(shape) - 1}
    rest = [dim for dim in range(len(shape)) if dim not in features and parts[dim] < shape[dim]]
    if len(shape) > 2:
        rest = [dim for dim in rest if dim]
    return max(rest, key=lambda dim: shape[dim] / parts[dim], default=None)


def whole_tilings(graph: Graph) -> Iterator[Tiled]:
    """The forward half in one sweep, on finer and finer grids."""
    try:
        segment = segment_of(graph, [op.id for op in graph.ops if op.phase is Phase.FORWARD])
        if segment.loss is None:
            return
        for number, parts in enumerate(_grids(segment)):
            if number == _WHOLE_GRIDS:
                return
            if prod(parts) > 1:
                yield Tiled(segment, parts, costs_of_sweep(segment, fitting_tiles(segment, parts)))
    except BadUse:
        return
