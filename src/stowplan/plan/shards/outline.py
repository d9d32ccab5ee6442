"""Outline: of a mesh of thousands the few workers whose shards tell those of all others."""

from collections.abc import Collection, Mapping, Sequence

from stowplan.geometry import Rect
from stowplan.plan.shards.even import divides, is_followed_evenly, outline, places_on
from stowplan.plan.shards.mesh import Mesh
from stowplan.plan.shards.propagation import ShardPropagation
from stowplan.plan.shards.shard import Pulling, Shard


def outlined(found: ShardPropagation, ends: Sequence[str]) -> dict[int, Shard]:
    """The shards of workers on the axes, and of one in the middle."""
    even = even_axes(found)
    while True:
        workers = sorted({*outline(found.mesh, even), found.mesh.middle})
        shards = Pulling(found, ends, workers).run()
        bent = bent_axes(found.mesh, even, shards)
        if not bent:
            return shards
        even -= bent


def even_axes(found: ShardPropagation) -> frozenset[int]:
    """The axes that are even for all tensors and ops of a step."""
    mesh, axes = found.mesh, set(range(len(found.mesh.axes)))
    for layout in set(found.layouts.values()):
        for axis, cell in enumerate(layout.axes):
            if cell is not None and not divides(mesh.axes[axis], layout.cells.sizes[cell]):
                axes.discard(axis)
    for sharding in found.shardings:
        for use, rule in zip(sharding.op.outputs, sharding.rules, strict=True):
            layout = found.layouts[use.tensor]
            axes = {axis for axis in axes if is_followed_evenly(mesh, axis, rule, layout)}
    return frozenset(axes)


def bent_axes(mesh: Mesh, even: Collection[int], shards: Mapping[int, Shard]) -> frozenset[int]:
    """Of the even axes those on which what the places hold of some tensor does not lie on a line."""
    return frozenset(axis for axis in even if _is_bent(mesh, axis, shards))


def _is_bent(mesh: Mesh, axis: int, shards: Mapping[int, Shard]) -> bool:
    places = tuple(places_on(mesh.axes[axis], even=True))
    if len(places) == mesh.axes[axis].size:
        return False
    held = [shards[mesh.on_axis(axis, place)].held for place in places]
    names = {name for rects in held for name in rects}
    return any(_bends(places, [rects.get(name) for rects in held]) for name in names)


def _bends(places: tuple[int, ...], rects: list[Rect | None]) -> bool:
    known = [rect for rect in rects if rect is not None]
    if len(known) != len(rects):
        return True
    bounds = zip(*((*rect.lo, *rect.hi) for rect in known), strict=True)
    return not all(_on_a_line(places, numbers) for numbers in bounds)


def _on_a_line(places: tuple[int, ...], numbers: tuple[int, ...]) -> bool:
    step = numbers[1] - numbers[0]
    return all(number == numbers[0] + place * step for place, number in zip(places, numbers, strict=True))
