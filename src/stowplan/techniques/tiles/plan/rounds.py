"""Rounds: a segment with statistics needs several passes over its tiles.

An op that needs its whole input (batch norm in training, a norm or a mean over positions) can be computed in
parts once its statistics are known. Each pass gathers the statistics of ops that depend on known statistics
only, and the last pass computes the outputs. Ops before a statistic are computed in every pass up to it: a
statistic of the segment's input costs one reading of that input, and one deep inside the segment doubles the
work.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stowplan.errors import NotTileable
from stowplan.ir import Op
from stowplan.ops.regions import Partial
from stowplan.ops.table import shape_of
from stowplan.techniques.tiles.plan.fitness import channels_are_cut, cuts_channels, fitting_tiles
from stowplan.techniques.tiles.plan.products import Product, product_before
from stowplan.techniques.tiles.plan.rects import Grid, TileLevels, cut_tensors, first_tile
from stowplan.techniques.tiles.plan.segment import Segment


@dataclass(frozen=True, slots=True)
class Round:
    """One pass over the tiles of a part of the segment; its outputs are the tensors that `statistics`
    describe.

    The last pass has no statistics and computes the segment's own outputs. `products` are by norm: the
    statistics of a norm after a product are gathered from the product's input.
    """

    segment: Segment
    tiles: Grid
    statistics: tuple[Op, ...]
    products: Mapping[str, Product]


def rounds_of(segment: Segment, parts: Sequence[int]) -> tuple[Round, ...]:
    """The passes that compute a segment on a grid; raises NotTileable if it cannot be tiled."""
    gathered = _gathered(segment, parts)
    products = _products(segment, gathered, parts)
    rounds, known = list[Round](), list[Op]()
    for grid, ops in _by_depth(segment, gathered, products, parts):
        sources = tuple(dict.fromkeys(source_of(op, products) for op in ops))
        behind = {op.id: products[op.id] for op in ops if op.id in products}
        factors = [name for product in behind.values() for name in product.factors]
        before = towards(segment, known, sources)
        read = tuple(dict.fromkeys((*before.inputs, *factors)))
        rounds.append(_round(replace(before, inputs=read), grid, ops, behind))
        known += ops
    last = replace(towards(segment, known, segment.outputs), loss=segment.loss)
    return (*rounds, _round(last, _last_grid(segment, last, parts), (), {}))


def refusal(segment: Segment, parts: Sequence[int]) -> str:
    """Why the segment cannot be computed on this grid; "" if it can."""
    try:
        rounds_of(segment, parts)
    except NotTileable as reason:
        return reason.reason
    return ""


def _round(
    segment: Segment, parts: Sequence[int], statistics: tuple[Op, ...], products: Mapping[str, Product]
) -> Round:
    tiles = fitting_tiles(segment, parts)
    for op in statistics:
        if any(cuts_channels(segment, op, tile) for tile, _ in tiles.kinds):
            raise NotTileable(channels_are_cut(op))
    return Round(segment, tiles, statistics, products)


def _last_grid(segment: Segment, last: Segment, parts: Sequence[int]) -> Sequence[int]:
    """One tile where the outputs follow from statistics alone, which were gathered on the grid."""
    if cut_tensors(last) == cut_tensors(segment) or not segment.outputs:
        return parts
    return (1,) * len(shape_of(segment.graph.tensors[segment.outputs[0]]))


def _gathered(segment: Segment, parts: Sequence[int]) -> list[Op]:
    """The ops whose statistics a tile cannot take of what it holds anyway."""
    open_ops = (op for op in segment.ops if op is not segment.loss and op.id not in segment.known)
    takers = [op for op in open_ops if segment.statistic(op)]
    if not takers:
        return []
    opened = replace(towards(segment, takers, segment.outputs), loss=segment.loss)
    first = first_tile(opened, _last_grid(segment, opened, parts))
    return [op for op in takers if _is_cut(segment, op, first)]


def _is_cut(segment: Segment, op: Op, tile: TileLevels) -> bool:
    statistic = segment.statistic(op)
    assert statistic is not None
    held, shape = tile.held.get(op.inputs[0].tensor), shape_of(segment.graph.tensors[op.inputs[0].tensor])
    if held is None:
        made = tile.held.get(op.outputs[0].tensor)
        return made is None or made.shape == shape_of(segment.graph.tensors[op.outputs[0].tensor])
    crossed = any((held.lo[dim], held.hi[dim]) != (0, shape[dim]) for dim in statistic.dims)
    return crossed or (statistic.partial is Partial.MOMENTS and 0 in statistic.dims)


def _products(segment: Segment, gathered: Sequence[Op], parts: Sequence[int]) -> dict[str, Product]:
    """By norm, the product before it; none if channels are cut: a tile then lacks the other channels."""
    if len(parts) > 1 and parts[1] > 1:
        return {}
    return {op.id: product for op in gathered if (product := product_before(segment, op))}


def source_of(op: Op, products: Mapping[str, Product]) -> str:
    """The tensor that the statistics of an op are gathered from."""
    return products[op.id].source if op.id in products else op.inputs[0].tensor


def _by_depth(
    segment: Segment, gathered: Sequence[Op], products: Mapping[str, Product], parts: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[Op, ...]]]:
    """Grids and the ops whose statistics are gathered together on one, first those with none before them."""
    depths = _depths(segment, {op.id for op in gathered})
    groups: dict[tuple[int, tuple[int, ...]], list[Op]] = {}
    for op in gathered:
        shape = shape_of(segment.graph.tensors[source_of(op, products)])
        grid = tuple(map(min, parts, shape)) if len(parts) == len(shape) else (1,) * len(shape)
        groups.setdefault((depths[op.id], grid), []).append(op)
    for (_, grid), ops in sorted(groups.items(), key=lambda item: item[0]):
        yield grid, tuple(ops)


def _depths(segment: Segment, gathered: set[str]) -> dict[str, int]:
    """By op, the largest number of statistics in a row before its input."""
    below: dict[str, int] = {}
    depths: dict[str, int] = {}
    for op in segment.ops:
        depths[op.id] = max((below.get(name, 0) for name in op.reads()), default=0)
        below |= dict.fromkeys(op.writes(), depths[op.id] + (op.id in gathered))
    return depths


def towards(segment: Segment, known: Sequence[Op], outputs: tuple[str, ...]) -> Segment:
    """The part of a segment that makes `outputs`, given the statistics of `known`."""
    totals = {op.id for op in known if (found := segment.statistic(op)) and found.is_output}
    given = [op.outputs[0].tensor for op in known if op.id in totals]
    wanted, ops = set(outputs), list[Op]()
    for op in reversed(segment.ops):
        if op.id not in totals and not wanted.isdisjoint(op.writes()):
            ops.append(op)
            wanted.update(op.reads())
    return replace(
        segment,
        ops=tuple(reversed(ops)),
        inputs=tuple(name for name in (*segment.inputs, *given) if name in wanted),
        outputs=outputs,
        loss=None,
        known=segment.known.union(op.id for op in known) - totals,
    )
