"""Where to cut several outputs of one segment so that a tile needs much the same of what they are made of.

A pool and a crop of one image, each cut evenly, do not lie over each other: tiles would make large parts of
the image twice. One output is cut evenly; the others where what they need ends where its parts do.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise, product

from stowplan.geometry import Rect
from stowplan.ir import Kind, Shape
from stowplan.ops.table import shape_of
from stowplan.plan.tiles.segment import Segment

Pull = Callable[[Mapping[str, Rect]], Mapping[str, Rect]]  # owned parts -> what is held for them
Span = tuple[int, int]


def aligned_grids(
    segment: Segment, cut: Sequence[str], parts: Sequence[int], pull: Pull
) -> list[tuple[Rect, ...]]:
    """The cells of each output, in row-major order; of an output that reaches less far some are empty."""
    shapes = {name: shape_of(segment.graph.tensors[name]) for name in cut}
    whole = {name: pull({name: Rect.of_shape(shapes[name])}) for name in cut}
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

    def needed(output: str, dim: int, end: int) -> int:
        rect = Rect.of_shape(shapes[output])
        upto = Rect(rect.lo, tuple(end if d == dim else size for d, size in enumerate(rect.hi)))
        held = pull({output: upto}).get(source)
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
