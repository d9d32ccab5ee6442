"""Outline: of a mesh of thousands the few workers whose shards tell those of all others."""

from collections.abc import Mapping, Sequence

from stowplan.geometry import Rect
from stowplan.plan.shards.even import CutSizes, is_followed, kinds_of, outline, places_on
from stowplan.plan.shards.layout import Layout
from stowplan.plan.shards.propagation import ShardPropagation
from stowplan.plan.shards.shard import Pulling, Shard


def outlined(found: ShardPropagation, ends: Sequence[str]) -> dict[int, Shard]:
    """The shards of workers on the axes, and of one in the middle."""
    cut = cut_sizes(found)
    while True:
        workers = sorted({*outline(found.mesh, cut), found.mesh.middle})
        shards = Pulling(found, ends, workers).run()
        bent = [axis for axis in cut if _is_bent(found, axis, cut, shards)]
        if not bent:
            return shards
        cut = {axis: sizes for axis, sizes in cut.items() if axis not in bent}


def cut_sizes(found: ShardPropagation) -> CutSizes:
    """The axes that all ops follow, with the sizes of the dims that they cut."""
    axes = set(range(len(found.mesh.axes)))
    for sharding in found.shardings:
        for use, rule in zip(sharding.op.outputs, sharding.rules, strict=True):
            layout = found.layouts[use.tensor]
            axes = {axis for axis in axes if is_followed(axis, rule, layout)}
    layouts = set(found.layouts.values())
    return {axis: frozenset(_cut_size(layout, axis) for layout in layouts) for axis in axes}


def _cut_size(layout: Layout, axis: int) -> int:
    """The size of the dim that an axis cuts; 0, of which all places have as much, if it cuts none."""
    cell = layout.axes[axis]
    return 0 if cell is None else layout.cells.sizes[cell]


def _is_bent(found: ShardPropagation, axis: int, cut: CutSizes, shards: Mapping[int, Shard]) -> bool:
    """Whether places of a kind hold parts of some tensor whose bounds do not lie on a line."""
    mesh = found.mesh
    places = places_on(mesh.axes[axis], cut[axis])
    if len(places) == mesh.axes[axis].size:
        return False
    held = {place: shards[mesh.on_axis(axis, place)].held for place in places}
    for name in {name for rects in held.values() for name in rects}:
        size = _cut_size(found.layouts[name], axis)
        kinds = kinds_of(mesh.axes[axis], frozenset([size]) if size else cut[axis])
        starts = mesh.axes[axis].bounds(size or max(cut[axis]))
        for kind in kinds:
            worked_out = [place for place in kind if place in held]
            if _bends([starts[place] for place in worked_out], [held[p].get(name) for p in worked_out]):
                return True
    return False


def _bends(starts: Sequence[int], rects: Sequence[Rect | None]) -> bool:
    known = [rect for rect in rects if rect is not None]
    if known and len(known) != len(rects):
        return True
    bounds = zip(*((*rect.lo, *rect.hi) for rect in known), strict=True)
    return not all(_on_a_line(starts, numbers) for numbers in bounds)


def _on_a_line(starts: Sequence[int], numbers: Sequence[int]) -> bool:
    run, rise = starts[-1] - starts[0], numbers[-1] - numbers[0]
    pairs = zip(starts, numbers, strict=True)
    if not run:
        return len(set(numbers)) == 1
    return all((number - numbers[0]) * run == (start - starts[0]) * rise for start, number in pairs)
