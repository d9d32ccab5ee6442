"""Even axes: long axes of which a few places tell all others exactly.

Where an axis cuts every dim into equal spans, and every op reads along that dim index by index, up to the
index, or always the same, the bounds of what place `p` holds are hulls of lines `p * step + offset`: low
bounds are concave in p, high ones convex. If such a bound lies on a line at the first two and the last two
places, it does so everywhere. So these four are worked out, and it is checked that they lie on a line.
"""

from collections.abc import Collection, Iterable

from stowplan.plan.shards.cell_relation import CellRelation
from stowplan.plan.shards.layout import Layout
from stowplan.plan.shards.mesh import Axis, Mesh

_ENDS = 2  # places at either end of an even axis that are worked out


def is_followed_evenly(mesh: Mesh, axis: int, rule: CellRelation, layout: Layout) -> bool:
    """Whether what a place needs for its share of an output is what the first needs, further along."""
    cell = layout.axes[axis]
    if cell is None:
        return True
    return divides(mesh.axes[axis], layout.cells.sizes[cell]) and rule.moves_along(cell)


def divides(axis: Axis, size: int) -> bool:
    """Whether all places get as much of a dim."""
    return not axis.weights and size % axis.size == 0


def places_on(axis: Axis, *, even: bool) -> Iterable[int]:
    """The places of an axis that are worked out."""
    if not even or axis.size <= 2 * _ENDS:
        return range(axis.size)
    return (*range(_ENDS), *range(axis.size - _ENDS, axis.size))


def outline(mesh: Mesh, even: Collection[int]) -> tuple[int, ...]:
    """Workers that stand on one of the axes: whatever can happen to a dim happens to one of these.

    Rects are products of spans, and each span follows from the place on one axis alone.
    """
    found = {
        mesh.on_axis(number, place)
        for number, axis in enumerate(mesh.axes)
        for place in places_on(axis, even=number in even)
    }
    return tuple(sorted(found))
