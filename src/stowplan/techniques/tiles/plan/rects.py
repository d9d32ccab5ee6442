"""The rectangles of one tile: what each op of a segment makes of its output, and needs for that.

Where to cut several outputs of one segment so that a tile needs much the same of what they are made of.

A pool and a crop of one image, each cut evenly, do not lie over each other: tiles would make large parts of
the image twice. One output is cut evenly; the others where what they need ends where its parts do.
"""

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise, product
from math import prod
from typing import TypeAlias, overload

from stowplan.errors import NotTileable
from stowplan.geometry import Rect
from stowplan.ir import Graph, Kind, Op, Shape
from stowplan.ops.regions import Relation
from stowplan.ops.regions.maps import Along, Always, Digit
from stowplan.ops.regions.relation import DimMap
from stowplan.ops.table import shape_of
from stowplan.plan.level import Level
from stowplan.techniques.tiles.plan.segment import Segment, reduction_of

Pull = Callable[[Mapping[str, Rect], str], Mapping[str, Rect]]
"""From owned parts to what is held for them; of what a tensor is made of, if one is named, nothing."""

Span = tuple[int, int]


def aligned_grids(
    segment: Segment, cut: Sequence[str], parts: Sequence[int], pull: Pull
) -> list[tuple[Rect, ...]]:
    """The cells of each output, in row-major order; of an output that reaches less far some are empty."""
    shapes = {name: shape_of(segment.graph.tensors[name]) for name in cut}
    if len(cut) == 1:
        return [Rect.of_shape(shapes[cut[0]]).split(parts)]
    whole = {name: pull({name: Rect.of_shape(shapes[name])}, "") for name in cut}
    leader = max(cut, key=lambda name: _reach(segment, whole[name]))
    return [
        _follower(shapes[name], shapes[leader], parts, _boundary(segment, name, leader, shapes, whole, pull))
        if name != leader
        else Rect.of_shape(shapes[name]).split(parts)
        for name in cut
    ]


def _reach(segment: Segment, held: Mapping[str, Rect]) -> int:
    """How much of what the segment reads an output needs."""
    tensors = segment.graph.tensors
    return sum(held[n].volume for n in segment.inputs if n in held and tensors[n].kind is not Kind.PARAMETER)


def _boundary(
    segment: Segment,
    name: str,
    leader: str,
    shapes: Mapping[str, Shape],
    whole: Mapping[str, Mapping[str, Rect]],
    pull: Pull,
) -> Callable[[int, int], int] | None:
    """By dim and end of a part of the leader, the end of the part of `name` that needs no more; None if they
    have nothing in common."""
    made = [n for op in segment.ops for n in op.writes()]
    order = {n: place for place, n in enumerate((*segment.inputs, *made))}
    ndim = len(shapes[name])
    shared = [
        n
        for n in order
        if n in whole[name] and n in whole[leader] and whole[name][n].ndim == ndim == len(shapes[leader])
        if segment.graph.tensors[n].kind is not Kind.PARAMETER
    ]
    if not shared:
        return None
    source = max(shared, key=order.__getitem__)

    @cache
    def needed(output: str, dim: int, end: int) -> int:
        rect = Rect.of_shape(shapes[output])
        upto = Rect(rect.lo, tuple(end if d == dim else size for d, size in enumerate(rect.hi)))
        held = pull({output: upto}, source).get(source)
        return held.hi[dim] if held else 0

    def boundary(dim: int, end: int) -> int:
        limit, size = needed(leader, dim, end), shapes[name][dim]
        return bisect_right(range(1, size + 1), limit, key=lambda e: needed(name, dim, e))

    return boundary


def _follower(
    shape: Shape, leading: Shape, parts: Sequence[int], boundary: Callable[[int, int], int] | None
) -> tuple[Rect, ...]:
    if boundary is None:
        return Rect.of_shape(shape).split(parts)
    spans: list[list[Span]] = []
    for dim, count in enumerate(parts):
        ends = (boundary(dim, leading[dim] * i // count) for i in range(1, count))
        inner = accumulate(ends, max)  # ascending, whatever the rules say: the parts must cover all
        spans.append(list(pairwise((0, *inner, shape[dim]))))
    return tuple(Rect(tuple(lo for lo, _ in cell), tuple(hi for _, hi in cell)) for cell in product(*spans))


@dataclass(frozen=True, slots=True)
class TileLevels:
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


class Grid(Sequence[TileLevels]):
    """The tiles of a grid in row-major order. Tiles of one kind take the same memory and do the same work."""

    @property
    @abstractmethod
    def kinds(self) -> Sequence[tuple[TileLevels, int]]:
        """The last tile of each kind, in the order of the tiles, and how many there are of it."""

    @property
    @abstractmethod
    def tiles(self) -> tuple[TileLevels, ...]:
        """All of them."""

    @overload
    def __getitem__(self, place: int) -> TileLevels: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[TileLevels, ...]: ...
    def __getitem__(self, place: int | slice) -> TileLevels | tuple[TileLevels, ...]:
        return self.tiles[place]


class _Listed(Grid):
    """Tiles that were made one by one."""

    def __init__(self, graph: Graph, tiles: Iterable[TileLevels]) -> None:
        self._graph, self._tiles = graph, tuple(tiles)

    @property
    def tiles(self) -> tuple[TileLevels, ...]:
        return self._tiles

    def __len__(self) -> int:
        return len(self._tiles)

    @cached_property
    def kinds(self) -> list[tuple[TileLevels, int]]:
        return [(self._tiles[place], count) for place, count in _kinds(self._graph, self._tiles)]


def _kinds(graph: Graph, tiles: Sequence[TileLevels]) -> list[tuple[int, int]]:
    """The number of the last tile of each kind, ascending, and how many there are of it."""
    found = dict[Kindred, tuple[int, int]]()
    for place, tile in enumerate(tiles):
        kind = _kindred(graph, tile)
        found[kind] = place, found.get(kind, (0, 0))[1] + 1
    return sorted(found.values())


Kindred: TypeAlias = tuple[object, ...]


def _kindred(graph: Graph, tile: TileLevels) -> Kindred:
    """What tiles of one kind have in common: the sizes of all parts, and how far each op reads past borders.

    Where in a tensor a part lies is all that is left out.
    """
    levels = [
        (
            level.op.id,
            level.output,
            *(
                need and (need.shape, need.overhang(shape_of(graph.tensors[use.tensor])))
                for use, need in zip(level.op.inputs, level.needs, strict=True)
            ),
        )
        for level in tile.levels
    ]
    held = [(name, rect.shape) for name, rect in tile.held.items()]
    return *levels, *held, *((name, rect.shape) for name, rect in tile.owned.items())


def tiles_of(segment: Segment, parts: Sequence[int]) -> Iterator[TileLevels]:
    """The tiles of a grid, one after the other."""
    return iter(grid_of(segment, parts))


def grid_of(segment: Segment, parts: Sequence[int]) -> Grid:
    """The grid of `parts[i]` pieces along dim i of every tensor that is cut."""
    regions = regions_by_op(segment)
    cells = _cells(segment, parts, regions)
    if sum(count > 1 for count in parts) < 2 or (edges := _edges_of(segment, cells, parts, regions)) is None:
        return _Listed(segment.graph, (tile_of(segment, owned, regions) for owned in cells))
    return edges


def first_tile(segment: Segment, parts: Sequence[int]) -> TileLevels:
    """The first tile of a grid."""
    regions = regions_by_op(segment)
    return tile_of(segment, _cells(segment, parts, regions)[0], regions)


def _cells(
    segment: Segment, parts: Sequence[int], regions: Mapping[str, tuple[Relation, ...]]
) -> list[dict[str, Rect]]:
    """By tile, the part that it owns of each tensor that is cut."""
    cut = cut_tensors(segment)
    for name in cut:
        shape = shape_of(segment.graph.tensors[name])
        if len(shape) != len(parts) or any(n > size for n, size in zip(parts, shape, strict=True)):
            raise NotTileable(
                f"{name!r} of shape {shape} cannot be cut into {'x'.join(map(str, parts))} parts"
            )

    def held_for(owned: Mapping[str, Rect], down_to: str) -> Mapping[str, Rect]:
        return tile_of(segment, owned, regions, down_to).held

    grids = aligned_grids(segment, cut, parts, held_for)
    return [dict(zip(cut, each, strict=True)) for each in zip(*grids, strict=True)]


def regions_by_op(segment: Segment) -> dict[str, tuple[Relation, ...]]:
    """The region rules of all ops of a segment, looked up once for all its tiles."""
    return {op.id: segment.relations(op) for op in segment.ops}


def tile_of(
    segment: Segment,
    owned: Mapping[str, Rect],
    regions: Mapping[str, tuple[Relation, ...]],
    down_to: str = "",
) -> TileLevels:
    """The tile that makes these parts of what is cut.

    Pulls through the ops from the last to the first; what has several readers is held as far as all need.
    With `down_to`, only as far as what is held of that tensor.
    """
    graph = segment.graph
    if segment.loss is not None:
        owned = _operands_of_loss(graph, segment.loss, owned)
    owned = {name: rect for name, rect in owned.items() if not rect.is_empty}
    held, levels = dict(owned), list[Level]()
    for op in reversed(segment.ops):
        if op is segment.loss:
            continue
        if down_to and down_to in op.writes():
            break
        for level in _levels_of(op, regions[op.id], held):
            levels.append(level)
            for use, need in zip(op.inputs, level.needs, strict=True):
                if need is not None:
                    part = need.clip(shape_of(graph.tensors[use.tensor]))
                    known = held.get(use.tensor)
                    held[use.tensor] = part if known is None else part.hull(known)
    return TileLevels(tuple(reversed(levels)), held, owned)


def _levels_of(op: Op, relations: Sequence[Relation], held: Mapping[str, Rect]) -> Iterator[Level]:
    for position, use in enumerate(op.outputs):
        if use.tensor in held:
            made = held[use.tensor]
            yield Level(op, position, made, relations[position].pull(made))


def _operands_of_loss(graph: Graph, loss: Op, owned: Mapping[str, Rect]) -> dict[str, Rect]:
    """The parts of scores, labels and weights that belong to a part of the scores."""
    scores = owned[loss.inputs[0].tensor]
    found: dict[str, Rect] = {}
    for name, followed in _dims_of_scores(graph, loss).items():
        whole = Rect.of_shape(shape_of(graph.tensors[name]))
        lo = (low if dim is None else scores.lo[dim] for low, dim in zip(whole.lo, followed, strict=True))
        hi = (high if dim is None else scores.hi[dim] for high, dim in zip(whole.hi, followed, strict=True))
        found[name] = Rect(tuple(lo), tuple(hi))
    return found


def _dims_of_scores(graph: Graph, loss: Op) -> dict[str, tuple[int | None, ...]]:
    """By operand of a loss and its dims, the dim of the scores that it follows; None if it is read whole."""
    reduction = reduction_of(graph, loss)
    dims = reduction.dims if reduction else {}
    return {
        use.tensor: tuple(
            dims[0][dims[position].index(dim)] if dim in dims.get(position, ()) else None
            for dim in range(len(shape_of(graph.tensors[use.tensor])))
        )
        for position, use in enumerate(loss.inputs)
    }


Followed: TypeAlias = tuple[int, ...]
"""By dim of a tensor, the dim of the grid along which the parts of tiles differ; -1 where all are alike."""


class _Edges(Grid):
    """The tiles of a grid as products: along each dim, a tile reaches as far as one at the grid's edge.

    `edges` has, by dim of the grid, the tiles that are first along all other dims. What a tile owns, holds
    and, level by level, needs follows the dims of the grid as the other fields say. A tile is made when it is
    first asked for, and tiles are of one kind if their edges are.
    """

    def __init__(
        self,
        graph: Graph,
        edges: Sequence[Sequence[TileLevels]],
        owned: Mapping[str, Followed],
        held: Mapping[str, Followed],
        needs: Sequence[Sequence[Followed | None]],
    ) -> None:
        self._graph, self._edges, self._needs = graph, edges, needs
        self._owned, self._held = owned, held

    def __iter__(self) -> Iterator[TileLevels]:
        return iter(self.tiles) if "tiles" in vars(self) else map(self._crossed, product(*self._edges))

    def __len__(self) -> int:
        return prod(map(len, self._edges))

    @cached_property
    def tiles(self) -> tuple[TileLevels, ...]:
        return tuple(map(self._crossed, product(*self._edges)))

    @cached_property
    def kinds(self) -> list[tuple[TileLevels, int]]:
        along = ([(edge[place], count) for place, count in _kinds(self._graph, edge)] for edge in self._edges)
        return [
            (self._crossed([tile for tile, _ in at]), prod(count for _, count in at))
            for at in product(*along)
        ]

    def _crossed(self, at: Sequence[TileLevels]) -> TileLevels:
        held = {name: _crossing([t.held[name] for t in at], self._held[name]) for name in at[0].held}
        owned = {name: _crossing([t.owned[name] for t in at], self._owned[name]) for name in at[0].owned}
        return TileLevels(tuple(self._levels(at, held)), held, owned)

    def _levels(self, at: Sequence[TileLevels], held: Mapping[str, Rect]) -> Iterator[Level]:
        for number, followed in enumerate(self._needs):
            levels = [tile.levels[number] for tile in at]
            needs = [
                None if dims is None else _crossing([n for each in levels if (n := each.needs[place])], dims)
                for place, dims in enumerate(followed)
            ]
            op, output = levels[0].op, levels[0].output
            yield Level(op, output, held[op.outputs[output].tensor], tuple(needs))


def _crossing(rects: Sequence[Rect], followed: Followed) -> Rect:
    """Along each dim as far as the rect of that edge which the dim follows."""
    if len({*followed} - {-1}) < 2:
        return rects[max(followed, default=0)]
    lo = tuple([rects[of].lo[dim] for dim, of in enumerate(followed)])
    return Rect(lo, tuple([rects[of].hi[dim] for dim, of in enumerate(followed)]))


def _edges_of(
    segment: Segment,
    cells: Sequence[Mapping[str, Rect]],
    parts: Sequence[int],
    regions: Mapping[str, tuple[Relation, ...]],
) -> _Edges | None:
    """The edges of a grid; None if its tiles are not known to be products of them."""
    owned = _followed_by_owned(segment, parts)
    found = _followed_in(segment, owned, regions)
    if found is None:
        return None
    held, needs = found
    steps = [prod(parts[dim + 1 :]) for dim in range(len(parts))]
    first = tile_of(segment, cells[0], regions)
    edges = [
        [first, *(tile_of(segment, cells[place * step], regions) for place in range(1, count))]
        for count, step in zip(parts, steps, strict=True)
    ]
    is_whole = all(_has_all(segment.graph, tile, owned, needs) for edge in edges for tile in edge)
    return _Edges(segment.graph, edges, owned, held, needs) if is_whole else None


def _followed_by_owned(segment: Segment, parts: Sequence[int]) -> dict[str, Followed]:
    followed = tuple(dim if count > 1 else -1 for dim, count in enumerate(parts))
    if segment.loss is None:
        return dict.fromkeys(cut_tensors(segment), followed)
    return {
        name: tuple(-1 if dim is None else followed[dim] for dim in dims)
        for name, dims in _dims_of_scores(segment.graph, segment.loss).items()
    }


def _followed_in(
    segment: Segment, owned: Mapping[str, Followed], regions: Mapping[str, tuple[Relation, ...]]
) -> tuple[dict[str, Followed], list[tuple[Followed | None, ...]]] | None:
    """What all parts follow: by tensor, and by level and input; None if a dim would follow two of the grid.

    Goes through the ops as `tile_of` does.
    """
    held, needs = dict(owned), list[tuple[Followed | None, ...]]()
    for op in reversed(segment.ops):
        if op is segment.loss:
            continue
        for use, relation in zip(op.outputs, regions[op.id], strict=True):
            if use.tensor not in held:
                continue
            of_level = list[Followed | None]()
            for source, need in zip(op.inputs, relation.needs, strict=True):
                if need is None:
                    of_level.append(None)
                    continue
                here = [_followed_by(dim_map, held[use.tensor]) for dim_map in need.dims]
                known = held.get(source.tensor, (-1,) * len(here))
                both = [one | other for one, other in zip(here, map(_alone, known), strict=True)]
                if any(len(dims) > 1 for dims in (*here, *both)):
                    return None
                of_level.append(tuple(max(dims, default=-1) for dims in here))
                held[source.tensor] = tuple(max(dims, default=-1) for dims in both)
            needs.append(tuple(of_level))
    return held, needs[::-1]


def _alone(dim: int) -> frozenset[int]:
    return frozenset[int]() if dim < 0 else frozenset((dim,))


def _followed_by(dim_map: DimMap, followed: Followed) -> frozenset[int]:
    """The dims of the grid that an input dim follows, given those that the output's dims follow."""
    match dim_map:
        case Along():
            dims: Iterable[int] = (dim_map.dim,)
        case Digit():
            dims = dim_map.dims
        case Always():
            dims = ()
        case _:
            dims = range(len(followed))
    return frozenset(followed[dim] for dim in dims) - {-1}


def _has_all(
    graph: Graph, tile: TileLevels, owned: Mapping[str, Followed], needs: Sequence[Sequence[Followed | None]]
) -> bool:
    """Whether a tile owns a part of all that is cut and every op in it reads a part of all that it can."""
    return (
        tile.owned.keys() == owned.keys()
        and len(tile.levels) == len(needs)
        and all(
            (need is None and dims is None)
            or (need is not None and not need.clip(shape_of(graph.tensors[use.tensor])).is_empty)
            for level, followed in zip(tile.levels, needs, strict=True)
            for use, need, dims in zip(level.op.inputs, level.needs, followed, strict=True)
        )
    )
