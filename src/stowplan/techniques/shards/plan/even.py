"""Kinds of places: a few places of a long axis tell all others exactly.

Two places are of one kind if their spans of every dim that the axis cuts are as long. Where every op reads
along these dims index by index, up to the index, or always the same, the bounds of what a place holds are
hulls of lines over the start of its span: low bounds are concave, high ones convex. If such a bound lies on a
line at the first two and the last two places of a kind, it does so at all of them. So these four are worked
out, and it is checked that they lie on a line. Thousands of places are of one or two kinds.
"""

from collections.abc import Mapping, Sequence
from functools import cache

from stowplan.techniques.shards.plan.cell_relation import CellRelation
from stowplan.techniques.shards.plan.layout import Layout
from stowplan.techniques.shards.plan.mesh import Axis, MeshAxes

_ENDS = 2  # the first and the last places of a kind that are worked out

CutSizes = Mapping[int, frozenset[int]]
"""By axis that all ops follow, the sizes of the dims that it cuts."""


def is_followed(axis: int, rule: CellRelation, layout: Layout) -> bool:
    """Whether what a place needs for its share is what others of its kind need, further along."""
    cell = layout.axes[axis]
    return cell is None or rule.moves_along(cell)


@cache
def kinds_of(axis: Axis, sizes: frozenset[int]) -> Sequence[Sequence[int]]:
    """The places of an axis, grouped by the lengths of their spans of dims of these sizes."""
    bounds = [axis.bounds(size) for size in sorted(sizes)]
    kinds: dict[tuple[int, ...], list[int]] = {}
    for place in range(axis.size):
        kinds.setdefault(tuple(b[place + 1] - b[place] for b in bounds), []).append(place)
    return list(kinds.values())


def places_on(axis: Axis, sizes: frozenset[int] | None) -> Sequence[int]:
    """The places of an axis that are worked out: all of them, if it is not known that ops follow it."""
    if sizes is None:
        return range(axis.size)
    return sorted({place for kind in kinds_of(axis, sizes) for place in (*kind[:_ENDS], *kind[-_ENDS:])})


def outline(mesh: MeshAxes, cut: CutSizes) -> tuple[int, ...]:
    """Workers that stand on one of the axes: whatever can happen to a dim happens to one of these.

    Rects are products of spans, and each span follows from the place on one axis alone.
    """
    found = {
        mesh.on_axis(number, place)
        for number, axis in enumerate(mesh.axes)
        for place in places_on(axis, cut.get(number))
    }
    return tuple(sorted(found))
