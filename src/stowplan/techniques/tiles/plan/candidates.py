"""The tilings that are worth planning: from one stage in tiles to every stage that holds much memory.

Stages end at narrow cuts, where few bytes pass to the next op. A stage is cut finer until a tile is small
compared with it, along samples first, because cuts between samples cost nothing. The stages that hold the
most are tiled first. If the whole forward half can be cut up to its loss, running sample by sample is one
more candidate, which needs no recomputation.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from stowplan.errors import NotTileable
from stowplan.ir import Graph, Kind, Op, Phase
from stowplan.ops.table import shape_of
from stowplan.plan.select import Refusals
from stowplan.techniques.tiles.plan.barriers import runs_between_barriers
from stowplan.techniques.tiles.plan.borders import stretches_between_narrow_norms, stretches_between_norms
from stowplan.techniques.tiles.plan.costs import SweepCosts, costs_of_sweep
from stowplan.techniques.tiles.plan.rects import cut_tensors
from stowplan.techniques.tiles.plan.rounds import rounds_of
from stowplan.techniques.tiles.plan.segment import WHOLE_STEP, Segment, segment_of, stretch_of

_SMALL = (4, 16)  # a tile that takes this much less than its stage is small enough
_SMALLER = (*_SMALL, 64)  # the same without a backward half, where no gradients are beside a tile
_EVEN = ((1.0, 8 << 20), (0.4, 4 << 20))  # of the largest tile that is small enough, where all are about as
# large; and bytes of a part, which caches should hold: what is larger is read from memory by each op
_GAIN = 0.9  # of the peak before: a grid that is finer for less is not worth it
_HALO = 0.35  # a stage whose tiles compute this share twice is cut no finer
_REPEATED = 5.0  # the same without a backward half, for which norms inside repeat the ops before them
_DIP = 0.95  # the most bytes that may leave a stage, as a share of the most inside it
_RISE = 1.01  # of these bytes is a rise
_FALL = 0.3  # of the most inside it: a cut with fewer bytes ends a stage, unless the next cut has fewer still
_TILES = 256
_STAGES = 8


@dataclass(frozen=True, slots=True, eq=False)
class Tiled:
    """A segment on a grid, and its costs; compared by identity."""

    segment: Segment
    parts: tuple[int, ...]
    costs: SweepCosts


Tiling = tuple[Tiled, ...]


def stage_tilings(graph: Graph, refusals: Refusals) -> Iterator[Tiling]:
    """Tilings of some stages, from the largest one alone to all that can be tiled, coarse and fine."""
    for stretches in _kinds_of_stretches(graph):
        stages = [list(_until_small(grids_tried(graph, stretch, refusals))) for stretch in stretches]
        for small in _SMALL if graph.has_backward else _SMALLER:
            tiled = [found for tried in stages if (found := _first_small(tried, small))]
            sizes = sorted({_size(stage) for stage in tiled}, reverse=True)
            for size in sizes[:_STAGES]:
                yield tuple(stage for stage in tiled if _size(stage) >= size)


def evenly_tiled(graph: Graph, stretches: Iterable[tuple[str, ...]], refusals: Refusals) -> Iterator[Tiling]:
    """The stretches that can be cut, in tiles as large as those of the largest have to be, and in smaller."""
    tried = [list(_until_small(grids_tried(graph, stretch, refusals))) for stretch in stretches]
    fine = [found for grids in tried if (found := _first_small(grids, max(_SMALL)))]
    largest = max((tiled.costs.backward_peak_bytes for tiled in fine), default=0)
    for times, part in _EVEN:
        yield tuple(_first_within(grids, times * largest, part) for grids in tried if len(grids) > 1)


def _first_within(grids: Sequence[Tiled], limit: float, part: int) -> Tiled:
    """The coarsest grid whose tiles take no more, with parts no larger, or the finest."""
    fitting = (tiled for tiled in grids[1:] if tiled.costs.backward_peak_bytes <= limit)
    return next((tiled for tiled in fitting if tiled.costs.part_bytes <= part), grids[-1])


def _kinds_of_stretches(graph: Graph) -> Iterator[list[tuple[str, ...]]]:
    """Stages, then what is between norms, then between narrow ones, as far as there are such."""
    yield stages_of(graph)
    between_norms = stretches_between_norms(graph)
    if len(between_norms) > 1:
        yield between_norms
        between_narrow = stretches_between_narrow_norms(graph)
        if between_narrow != between_norms:
            yield between_narrow


def stages_of(graph: Graph, fall: float = _FALL) -> list[tuple[str, ...]]:
    """The forward half cut at barriers, and at local minima of the bytes that cross the cut.

    They are also cut where the bytes are below `fall` of the most inside, and not fewer right behind.
    """
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    crossing = _crossing_bytes(graph, forward)
    runs = runs_between_barriers(graph, forward)
    stages = (stage for run in runs for stage in _stages_of_run(crossing, run, fall))
    return [tuple(forward[place].id for place in stage) for stage in stages]


def _stages_of_run(crossing: Sequence[int], run: range, fall: float) -> Iterator[range]:
    start = run.start
    for place in range(start + 1, run.stop - 1):
        if _is_valley(crossing, start, place, fall):
            yield range(start, place + 1)
            start = place + 1
    yield range(start, run.stop)


def _is_valley(crossing: Sequence[int], start: int, place: int, fall: float) -> bool:
    """Whether the bytes are below the most of the stage, and rise again before they fall further.

    Where they are far below it, it is enough that they do not fall further at once.
    """
    here, most = crossing[place], max(crossing[start:place], default=0)
    rises = next((c > here for c in crossing[place + 1 :] if not here <= c <= _RISE * here), False)
    is_low = here < _DIP * most and crossing[place + 1] > here and rises
    return is_low or (here < fall * most and crossing[place + 1] >= here)


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
    """A rough size of the stage as one tile; twins have equal sizes."""
    inside = (tiled.segment.graph.tensors[name] for name in tiled.segment.inside)
    return sum(tensor.nbytes or 0 for tensor in inside if tensor.alias_of is None) >> 20


def grids_tried(graph: Graph, stage: tuple[str, ...], refusals: Refusals) -> Iterator[Tiled]:
    """One tile, then finer and finer grids, until tiles do too much twice or no longer get smaller.

    Why there is none but the first is written down.
    """
    found = list[Tiled]()
    try:
        segment = segment_of(graph, stage)
        for parts in _grids(segment):
            tiled = Tiled(segment, parts, costs_of_sweep(segment, rounds_of(segment, parts)))
            if found and _is_worse(tiled, found[0]):
                raise NotTileable("its tiles would overlap so much that they do most of the work twice")
            found.append(tiled)
            yield tiled
        if len(found) == 1:
            raise NotTileable("nothing that it makes is large enough to be cut")
    except NotTileable as refusal:
        if len(found) < 2:
            refusals.add(stretch_of(graph, stage), refusal)


def _until_small(tried: Iterator[Tiled]) -> Iterator[Tiled]:
    """Up to the first grid whose tiles are small, or hardly smaller than those before: no other is used."""
    peaks = list[int]()
    for tiled in tried:
        yield tiled
        peaks.append(tiled.costs.backward_peak_bytes)
        small = max(_SMALL if tiled.segment.graph.has_backward else _SMALLER)
        is_small = len(peaks) > 1 and peaks[-1] * small <= peaks[0]
        if is_small and tiled.costs.part_bytes <= min(part for _, part in _EVEN):
            return
        if len(peaks) > 2 and peaks[-1] > _GAIN * peaks[-2]:
            return


def _is_worse(tiled: Tiled, whole: Tiled) -> bool:
    most = _HALO if tiled.segment.graph.has_backward else _REPEATED
    return tiled.costs.forward_macs > (1 + most) * whole.costs.forward_macs


def _first_small(tried: Sequence[Tiled], small: int) -> Tiled | None:
    """The first grid whose tiles take so much less than one, or the last that still gained; None if none."""
    best: Tiled | None = None
    for tiled in tried[1:]:
        peak = tiled.costs.backward_peak_bytes
        if best is not None and peak > _GAIN * best.costs.backward_peak_bytes:
            break
        best = tiled
        if peak * small <= tried[0].costs.backward_peak_bytes:
            break
    return best


def _grids(segment: Segment) -> Iterator[tuple[int, ...]]:
    """One tile, then one per sample, then finer along the largest other dim."""
    cut = cut_tensors(segment)
    if not cut:
        raise NotTileable("nothing comes out")
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


def whole_tilings(graph: Graph, refusals: Refusals) -> Iterator[Tiled]:
    """The forward half in one sweep, on finer and finer grids."""
    try:
        segment = segment_of(graph, [op.id for op in graph.ops if op.phase is Phase.FORWARD])
        if segment.loss is None:
            return
        for parts in _grids(segment):
            tiled = Tiled(segment, parts, costs_of_sweep(segment, rounds_of(segment, parts)))
            if tiled.costs.halo_share > _HALO:
                return
            if prod(parts) > 1:
                yield tiled
    except NotTileable as refusal:
        refusals.add(WHOLE_STEP, refusal)
