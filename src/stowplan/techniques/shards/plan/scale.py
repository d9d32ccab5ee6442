"""Scale: the exact traffic of meshes of thousands of workers, from the few workers on their axes.

A rect is a product of spans, and each span depends on the place on one axis alone. So the overlaps of all
shares with all that is held are products too, of what the places of one axis have in common: on a mesh of 64
by 64, twice 64 spans are sorted, and not 4096 x 4096 rects compared.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

import numpy as np
from numpy.typing import NDArray

from stowplan.errors import TooManyWorkers
from stowplan.geometry import Rect
from stowplan.ops.windows import Span
from stowplan.techniques.shards.plan.even import kinds_of
from stowplan.techniques.shards.plan.plan import ShardPlan
from stowplan.techniques.shards.plan.traffic import itemsize_of

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MeshTraffic:
    """By worker: bytes sent point to point in a step, forward and backward, and messages."""

    sent_bytes: Counts
    messages: Counts


def mesh_traffic(plan: ShardPlan) -> MeshTraffic:
    """The bytes that every worker of a mesh sends, from the shards of the workers on its axes."""
    sent = np.zeros(plan.mesh.size, np.int64)
    messages = np.zeros(plan.mesh.size, np.int64)
    known: dict[Hashable, tuple[Counts, Counts, Counts, Counts]] = {}  # by layout and all that is held
    for name in plan.exchanged:
        parts = plan.layouts[name], tuple([shard.held.get(name) for shard in plan.shards.values()])
        if parts not in known:
            known[parts] = _overlaps(plan, name)
        given, received, targets, sources = known[parts]
        back = name in plan.differentiated
        sent += (given + received * back) * itemsize_of(plan.graph, name)
        messages += targets + sources * back
    return MeshTraffic(sent, messages)


def _overlaps(plan: ShardPlan, name: str) -> tuple[Counts, Counts, Counts, Counts]:
    """Elements given and received by every worker, and to and from how many others."""
    axes = [_along(plan, name, axis) for axis in range(len(plan.mesh.axes))]
    rest = _uncut_elements(plan, name)
    given, held, kept = (
        _product([getattr(a, key) for a in axes]) * rest for key in ("given", "held", "kept")
    )
    targets, sources = (_product([getattr(a, key) for a in axes]) for key in ("targets", "sources"))
    is_own = (kept > 0).astype(np.int64)
    return given - kept, held - kept, targets - is_own, sources - is_own


@dataclass(frozen=True, slots=True)
class _Along:
    """By place on one axis: indices given, held, and kept for itself; places it gives to and has from."""

    given: Counts
    held: Counts
    kept: Counts
    targets: Counts
    sources: Counts


def _along(plan: ShardPlan, name: str, axis: int) -> _Along:
    layout, places = plan.layouts[name], plan.mesh.axes[axis].size
    cell = layout.axes[axis]
    if cell is None:  # replicas: each serves its own row
        ones = np.ones(places, np.int64)
        return _Along(ones, ones, ones, ones, ones)
    bounds = np.array(plan.mesh.axes[axis].bounds(layout.cells.sizes[cell]), np.int64)
    low, high = (np.array(side, np.int64) for side in _held_along(plan, name, axis, cell))
    kept = np.maximum(0, np.minimum(bounds[1:], high) - np.maximum(bounds[:-1], low))
    below = _sum_of_least(bounds, high) - _sum_of_least(bounds, low)  # held by all, before each bound
    return _Along(
        given=np.diff(below),
        held=high - low,
        kept=kept,
        targets=_met(bounds[:-1], bounds[1:], low, high),
        sources=_met(low, high, bounds[:-1], bounds[1:]),
    )


def _sum_of_least(limits: Counts, numbers: Counts) -> Counts:
    """By limit, the sum of all numbers, each counted up to the limit."""
    ordered = np.sort(numbers)
    smaller = np.searchsorted(ordered, limits)
    sums = np.concatenate([[0], np.cumsum(ordered)])
    found: Counts = sums[smaller] + (len(ordered) - smaller) * limits
    return found


def _met(low: Counts, high: Counts, lows: Counts, highs: Counts) -> Counts:
    """By span, with how many of the others it has an index in common."""
    is_there = highs > lows
    begun = np.searchsorted(np.sort(lows[is_there]), high)
    ended = np.searchsorted(np.sort(highs[is_there]), low, side="right")
    return np.where(high > low, begun - ended, 0)


def _held_along(plan: ShardPlan, name: str, axis: int, cell: int) -> tuple[Sequence[int], Sequence[int]]:
    """Low and high bounds of what every place of an axis holds; those of one kind lie on a line."""
    along, size = plan.mesh.axes[axis], plan.layouts[name].cells.sizes[cell]
    starts = along.bounds(size)
    low, high = [0] * along.size, [0] * along.size
    for kind in kinds_of(along, frozenset([size])):
        workers = {place: plan.mesh.on_axis(axis, place) for place in kind}
        known = {place: _held(plan, name, w) for place, w in workers.items() if w in plan.shards}
        spans = {place: (rect.lo[cell], rect.hi[cell]) for place, rect in known.items()}
        if len(known) < len(kind):
            first, last = kind[0], kind[-1]
            run = starts[last] - starts[first] or 1
            for place in kind:
                way = starts[place] - starts[first]
                ends = zip(spans[first], spans[last], strict=True)
                spans[place] = cast("Span", tuple(a + way * (b - a) // run for a, b in ends))
        for place in kind:
            low[place], high[place] = spans[place]
    return low, high


def _uncut_elements(plan: ShardPlan, name: str) -> int:
    """Elements of what all workers hold alike in the cells that no axis cuts; refused if it differs."""
    layout = plan.layouts[name]
    first = _held(plan, name, 0)
    for axis in range(len(plan.mesh.axes)):
        for worker in plan.mesh.along(0, [axis]):
            rect = _held(plan, name, worker) if worker in plan.shards else first
            same = [c for c in range(rect.ndim) if c != layout.axes[axis]]
            if not rect.is_empty and any(_span(rect, cell) != _span(first, cell) for cell in same):
                raise TooManyWorkers(_uneven(plan, name, axis))
    uncut = (cell for cell in range(first.ndim) if cell not in layout.cut_cells)
    return prod(first.hi[cell] - first.lo[cell] for cell in uncut)


def _uneven(plan: ShardPlan, name: str, number: int) -> str:
    """Why workers along an axis have parts of a tensor that it does not cut, and what limits the axis."""
    axis = plan.mesh.axes[number]
    along = [worker for worker in plan.mesh.along(0, [number]) if worker in plan.shards]
    parts = len({_held(plan, name, worker) for worker in along})
    if not 1 < parts < len(along):
        return f"some of {plan.mesh.size} workers on mesh {plan.mesh} have nothing of {name!r}"
    return (
        f"mesh axis {axis.name}={axis.size} has more workers than {name!r} has parts for them: they read"
        f" {parts} parts of it, as where several heads of queries share one of keys and values;"
        f" give {axis.name!r} at most {parts} workers, and the others to another axis"
    )


def _held(plan: ShardPlan, name: str, worker: int) -> Rect:
    share = plan.layouts[name].share(plan.mesh, worker)
    return plan.shards[worker].held.get(name, Rect(share.lo, share.lo))


def _span(rect: Rect, cell: int) -> Span:
    return rect.lo[cell], rect.hi[cell]


def _product(factors: Sequence[Counts]) -> Counts:
    """For every worker the product over axes of what its place has."""
    total = np.ones(1, np.int64)
    for factor in factors:
        total = np.multiply.outer(total, factor).ravel()
    return total
