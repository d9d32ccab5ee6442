"""The rectangles of one tile: what each op of a segment makes of its output, and needs for that."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stowplan.errors import NotTileable
from stowplan.geometry import Rect
from stowplan.ir import Graph, Kind, Op
from stowplan.ops.regions import Relation
from stowplan.ops.table import shape_of
from stowplan.plan.level import Level
from stowplan.plan.tiles.cuts import aligned_grids
from stowplan.plan.tiles.segment import Segment, reduction_of


@dataclass(frozen=True, slots=True)
class Tile:
    """All levels of a tile, in order of execution, and the part that is held of every tensor."""

    levels: tuple[Level, ...]
    held: Mapping[str, Rect]
    owned: Mapping[str, Rect]  # of what is cut: the segment's outputs, or the operands of its loss


def cut_tensors(segment: Segment) -> tuple[str, ...]:
    """The tensors that tiles partition: the outputs, or what the loss or the last means are taken of."""
    if segment.loss is not None:
        return (segment.loss.inputs[0].tensor,)
    return _under_totals(segment) or segment.outputs


def _under_totals(segment: Segment) -> tuple[str, ...]:
    """The tensors that sums and means reduce, if all outputs follow from these alone."""
    tensors, sources = segment.graph.tensors, dict[str, None]()
    whole = {name for name in segment.inputs if tensors[name].kind is Kind.PARAMETER}
    for op in segment.ops:
        statistic = segment.statistic(op)
        if whole.issuperset(op.reads()):
            whole.update(op.writes())
        elif statistic and statistic.is_output and len(statistic.dims) > 1:
            whole.update(op.writes())
            sources[op.inputs[0].tensor] = None
    return tuple(sources) if sources and whole.issuperset(segment.outputs) else ()


def tiles_of(segment: Segment, parts: Sequence[int]) -> Iterator[Tile]:
    """The tiles of a grid of `parts[i]` pieces along dim i of every tensor that is cut."""
    graph = segment.graph
    cut = cut_tensors(segment)
    for name in cut:
        shape = shape_of(graph.tensors[name])
        if len(shape) != len(parts) or any(n > size for n, size in zip(parts, shape, strict=True)):
            raise NotTileable(
                f"{name!r} of shape {shape} cannot be cut into {'x'.join(map(str, parts))} parts"
            )
    regions = regions_by_op(segment)
    grids = aligned_grids(segment, cut, parts, lambda owned: tile_of(segment, owned, regions).held)
    for cells in zip(*grids, strict=True):
        yield tile_of(segment, dict(zip(cut, cells, strict=True)), regions)


def regions_by_op(segment: Segment) -> dict[str, tuple[Relation, ...]]:
    """The region rules of all ops of a segment, looked up once for all its tiles."""
    return {op.id: segment.relations(op) for op in segment.ops}


def tile_of(segment: Segment, owned: Mapping[str, Rect], regions: Mapping[str, tuple[Relation, ...]]) -> Tile:
    """The tile that makes these parts of what is cut.

    Pulls through the ops from the last to the first; what has several readers is held as far as all need.
    """
    graph = segment.graph
    if segment.loss is not None:
        owned = _operands_of_loss(graph, segment.loss, owned)
    owned = {name: rect for name, rect in owned.items() if not rect.is_empty}
    held, levels = dict(owned), list[Level]()
    for op in reversed(segment.ops):
        if op is segment.loss:
            continue
        for level in _levels_of(op, regions[op.id], held):
            levels.append(level)
            for use, need in zip(op.inputs, level.needs, strict=True):
                if need is not None:
                    part = need.clip(shape_of(graph.tensors[use.tensor]))
                    known = held.get(use.tensor)
                    held[use.tensor] = part if known is None else part.hull(known)
    return Tile(tuple(reversed(levels)), held, owned)


def _levels_of(op: Op, relations: Sequence[Relation], held: Mapping[str, Rect]) -> Iterator[Level]:
    for position, use in enumerate(op.outputs):
        if use.tensor in held:
            made = held[use.tensor]
            yield Level(op, position, made, relations[position].pull(made))


def _operands_of_loss(graph: Graph, loss: Op, owned: Mapping[str, Rect]) -> dict[str, Rect]:
    """The parts of scores, labels and weights that belong to a part of the scores."""
    reduction = reduction_of(graph, loss)
    scores = owned[loss.inputs[0].tensor]
    dims = reduction.dims if reduction else {}
    found: dict[str, Rect] = {}
    for position, use in enumerate(loss.inputs):
        lo, hi = [], []
        for dim, size in enumerate(shape_of(graph.tensors[use.tensor])):
            follows = dims[position].index(dim) if dim in dims.get(position, ()) else None
            source = None if follows is None else dims[0][follows]
            lo.append(0 if source is None else scores.lo[source])
            hi.append(size if source is None else scores.hi[source])
        found[use.tensor] = Rect(tuple(lo), tuple(hi))
    return found
