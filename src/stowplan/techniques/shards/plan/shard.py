"""Shard: what one worker makes and holds of every tensor, pulled back from what its ops need.

What a worker needs beyond its share it makes itself where that is cheap (the halo of a ReLU is the ReLU of a
halo): then it is exchanged once, before the first such op, and never stored twice. Else it is received.

Halos of convolutions: computed by the worker that needs them, or received, whichever takes less time.

A computed halo takes multiply-accumulates, forward and twice as many backward. A received halo takes two
messages, and copies of the held part, forward and backward. Both costs are in multiply-accumulates, because
their ratio differs less from machine to machine than seconds do, and all workers must decide alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from stowplan.geometry import Rect
from stowplan.ops import aten
from stowplan.ops.effects import Effect, effect_of, macs_of
from stowplan.ops.regions.relation import with_span
from stowplan.ops.table import Site, shape_of, site_of
from stowplan.ops.windows import Span
from stowplan.techniques.shards.plan.allowed import refusal_of_parts
from stowplan.techniques.shards.plan.layout import Layout
from stowplan.techniques.shards.plan.propagation import (
    LOOKUPS,
    SUMMED,
    TOGETHER,
    OpSharding,
    ShardingKind,
    ShardPropagation,
)
from stowplan.techniques.shards.plan.weights import PRODUCTS

_LITTLE = 1.1  # times a worker's share: more of it would take memory that shards are there to save
_MACS_PER_MESSAGE = 2e7  # half a millisecond of a core, with the wait for the other worker
_MACS_PER_BYTE = 5  # read or written


def is_made(site: Site, shares: Sequence[Rect], wanted: Sequence[Rect]) -> bool:
    """Whether workers make what they want of a convolution's output, beyond their shares."""
    growth = _growth(shares, wanted)
    largest = prod(max(along) for along in zip(*(share.shape for share in shares), strict=True))
    part = largest / max(1, prod(shape_of(site.outputs[0])))
    held_bytes = (site.outputs[0].nbytes or 0) * part * growth
    made = 3 * macs_of(site) * part * (growth - 1)
    return growth <= _LITTLE and made <= 2 * _MACS_PER_MESSAGE + 4 * _MACS_PER_BYTE * held_bytes


def _growth(shares: Sequence[Rect], wanted: Sequence[Rect]) -> float:
    """How many times its share a worker would make at most, which those on the axes of a mesh tell."""
    pairs = [(w.shape, s.shape) for w, s in zip(wanted, shares, strict=True) if not s.is_empty]
    ratios = [[more / size for more, size in zip(*pair, strict=True)] for pair in pairs]
    growth: float = prod(max(along) for along in zip(*ratios, strict=True))
    return growth


CARRIED = frozenset(
    {
        *aten.POINTWISE,
        *aten.POINTWISE_FIRST,
        *aten.VIEWS,
        *(f"aten.{name}.default" for name in ("cat", "clone", "_to_copy", "constant_pad_nd")),
    }
)
"""Ops cheap enough to repeat for a part that a neighbour has computed."""

LIKES = tuple(f"aten.{name}_like.default" for name in ("empty", "full", "ones", "zeros"))
"""Ops that fill any part of their output alike, and ask their input for nothing but its looks."""

_MOST_CARRIED = 1.5  # times a worker's share: beyond that, a gathered tensor would be computed by everyone
_CONVOLUTION = "aten.convolution.default"


@dataclass(frozen=True, slots=True)
class ShardLevel:
    """One output of one op on one worker: the part made, and per input what that needs, not clipped."""

    sharding: OpSharding
    output: int
    made: Rect
    needs: tuple[Rect | None, ...]

    @property
    def name(self) -> str:
        """The tensor it makes a part of."""
        return self.sharding.op.outputs[self.output].tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """The levels of a worker in the order they run, and by tensor what it holds once it has what it needs."""

    levels: tuple[ShardLevel, ...]
    made: Mapping[str, Rect]
    held: Mapping[str, Rect]


Parts: TypeAlias = tuple[Rect | None, ...]
"""By worker, its part of a tensor; None for a worker that needs nothing of it."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """What workers make of an op, and what that needs: ops that are alike share it.

    `levels` are by worker the part made of the first output and what it needs of each input. `needs` are by
    input the numbers of these parts without what lies outside the input; None for an input that is not read.
    """

    made: Sequence[Sequence[Rect]]  # by output and worker
    levels: Sequence[tuple[Rect, tuple[Rect | None, ...]]]
    needs: Sequence[int | None]


class Pulling:
    """Pulls demands back through the ops for several workers at once: some decisions are theirs together.

    Equal parts have one number, so that an op of a repeated layer is known by what is needed of it.
    """

    def __init__(self, propagated: ShardPropagation, ends: Sequence[str], workers: Sequence[int]) -> None:
        self._found, self._mesh = propagated, propagated.mesh
        self._workers = tuple(workers)
        self._known_shares: dict[Layout, list[Rect]] = {}
        self._parts: list[Parts] = []
        self._numbers: dict[Parts, int] = {}
        self._hulls: dict[tuple[int, int], int] = {}
        self._draws: dict[int, bool] = {}  # by number of ops alike
        self._taken: dict[tuple[int, int, int | None], _Taken] = {}  # by that, output, and what is needed
        self._needed: dict[str, int] = {}  # by tensor, the number of what workers need
        self._made: dict[str, Sequence[Rect]] = {}
        self._levels: list[tuple[OpSharding, int, _Taken]] = []
        for name in ends:
            self._need(name, self._number(tuple(self._shares(self._layout(name)))))

    def run(self) -> dict[int, Shard]:
        """The shards by worker."""
        for sharding in reversed(self._found.shardings):
            if sharding.kind in TOGETHER:
                self._take_together(sharding)
                continue
            for number in reversed(range(len(sharding.op.outputs))):
                self._take(sharding, number)
        return {worker: self._shard(place) for place, worker in enumerate(self._workers)}

    def _shard(self, place: int) -> Shard:
        levels = [
            ShardLevel(op, number, *taken.levels[place]) for op, number, taken in reversed(self._levels)
        ]
        parts = ((name, self._parts[number][place]) for name, number in self._needed.items())
        held = {name: part for name, part in parts if part is not None}
        return Shard(tuple(levels), {name: made[place] for name, made in self._made.items()}, held)

    def _layout(self, name: str) -> Layout:
        return self._found.layouts[name]

    def _number(self, parts: Parts) -> int:
        number = self._numbers.setdefault(parts, len(self._parts))
        if number == len(self._parts):
            self._parts.append(parts)
        return number

    def _need(self, name: str, parts: int | None) -> None:
        if parts is not None:
            known = self._needed.get(name, parts)
            self._needed[name] = parts if known == parts else self._hull(known, parts)

    def _hull(self, first: int, second: int) -> int:
        """The number of what two demands have together."""
        if (first, second) not in self._hulls:
            pairs = zip(self._parts[first], self._parts[second], strict=True)
            hulls = tuple(b if a is None else a if b is None else a.hull(b) for a, b in pairs)
            self._hulls[first, second] = self._number(hulls)
        return self._hulls[first, second]

    def _take(self, sharding: OpSharding, number: int) -> None:
        name = sharding.op.outputs[number].tensor
        wanted = self._needed.get(name)
        draws = number == 0 and self._is_drawn(sharding)
        if wanted is None and not draws:
            return
        look = sharding.alike, number, wanted
        if look not in self._taken:
            made = self._parts_made(sharding, number, name, draws)
            needs = [sharding.rules[number].pull(part) for part in made]
            self._taken[look] = self._worked_out(sharding, [made], needs)
        self._add(sharding, number, [name], self._taken[look])

    def _worked_out(
        self, sharding: OpSharding, made: Sequence[Sequence[Rect]], needs: Sequence[tuple[Rect | None, ...]]
    ) -> _Taken:
        numbers: list[int | None] = []
        for use, parts in zip(sharding.op.inputs, zip(*needs, strict=True), strict=True):
            sizes = self._layout(use.tensor).cells.sizes
            inside = tuple(None if part is None else part.clip(sizes) for part in parts)
            numbers.append(None if inside.count(None) == len(inside) else self._number(inside))
        return _Taken(made, list(zip(made[0], needs, strict=True)), numbers)

    def _add(self, sharding: OpSharding, number: int, names: Sequence[str], taken: _Taken) -> None:
        self._made.update(zip(names, taken.made, strict=True))
        self._levels.append((sharding, number, taken))
        for use, parts in zip(sharding.op.inputs, taken.needs, strict=True):
            self._need(use.tensor, parts)

    def _take_together(self, sharding: OpSharding) -> None:
        """Sums and statistics: all workers take part, whatever they need, and all outputs come at once."""
        names = [use.tensor for use in sharding.op.outputs]
        if not any(name in self._needed for name in names):
            return
        look = sharding.alike, 0, self._needed.get(names[0])
        if look not in self._taken:
            made = [self._shares(self._layout(name)) for name in names]
            if sharding.kind is ShardingKind.NORM:
                made[0] = self._wanted(names[0], made[0])
            pairs = zip(made[0], self._workers, strict=True)
            needs = [self._counted(sharding, part, worker) for part, worker in pairs]
            self._taken[look] = self._worked_out(sharding, made, needs)
        self._add(sharding, 0, names, self._taken[look])

    def _is_drawn(self, sharding: OpSharding) -> bool:
        if sharding.alike not in self._draws:
            effect = effect_of(site_of(self._found.graph, sharding.op))
            self._draws[sharding.alike] = bool(effect & Effect.RANDOM)
        return self._draws[sharding.alike]

    def _wanted(self, name: str, shares: Sequence[Rect]) -> list[Rect]:
        """What workers need of a tensor."""
        number = self._needed.get(name)
        needed = self._parts[number] if number is not None else (None,) * len(shares)
        pairs = zip(needed, shares, strict=True)
        return [Rect(share.lo, share.lo) if part is None else part for part, share in pairs]

    def _parts_made(self, sharding: OpSharding, number: int, name: str, draws: bool) -> list[Rect]:
        layout = self._layout(name)
        shares = self._shares(layout)
        wanted = self._wanted(name, shares)
        if draws:
            return shares
        if layout.is_everywhere or all(map(Rect.contains, shares, wanted)):
            return wanted if self._can(sharding, number, wanted) else shares
        return wanted if self._is_carried(sharding, number, shares, wanted) else shares

    def _shares(self, layout: Layout) -> list[Rect]:
        if layout not in self._known_shares:
            self._known_shares[layout] = [layout.share(self._mesh, worker) for worker in self._workers]
        return self._known_shares[layout]

    def _is_carried(self, sharding: OpSharding, number: int, shares: list[Rect], wanted: list[Rect]) -> bool:
        if sharding.op.type == _CONVOLUTION:
            site = site_of(self._found.graph, sharding.op)
            return is_made(site, shares, wanted) and self._can(sharding, number, wanted)
        if number or sharding.op.type not in CARRIED:
            return False
        owned, hulls = (sum(rect.volume for rect in rects) for rects in (shares, wanted))
        return hulls <= _MOST_CARRIED * owned and self._can(sharding, number, wanted)

    def _can(self, sharding: OpSharding, number: int, made: Sequence[Rect]) -> bool:
        """Whether the op makes these parts of an output, one on each worker."""
        if sharding.op.type in LIKES:
            return True
        site = site_of(self._found.graph, sharding.op)
        cells = [self._layout(use.tensor).cells for use in sharding.op.inputs]
        layout = self._layout(sharding.op.outputs[number].tensor)
        refusal = refusal_of_parts(site, number, sharding.rules[number], layout, cells)
        return not any(map(refusal, set(made)))

    def _counted(self, sharding: OpSharding, made: Rect, worker: int) -> tuple[Rect | None, ...]:
        """The inputs that the worker's sums need, and for a norm also those that normalising `made` needs."""
        if sharding.op.type in (*PRODUCTS, *LOOKUPS):
            return self._factors(sharding, made, worker)
        share = self._layout(sharding.op.inputs[0].tensor).share(self._mesh, worker)
        if sharding.kind is ShardingKind.NORM:
            image = sharding.rules[0].pull(made)[0]
            vectors = (Rect.of_shape(cells.sizes) for cells in sharding.rules[0].inputs[1:])
            return (share if image is None else share.hull(image), *vectors)
        if sharding.op.type in SUMMED or sharding.kind is ShardingKind.SOFTMAX:
            return (share,)
        return tuple(self._operand(sharding, number, share) for number in range(len(sharding.op.inputs)))

    def _factors(self, sharding: OpSharding, made: Rect, worker: int) -> tuple[Rect | None, ...]:
        """The inputs of a product over the worker's part of the inner dim, or of a lookup in its rows."""
        needs = list(sharding.rules[0].pull(made))
        is_product = sharding.op.type in PRODUCTS
        for number in PRODUCTS[sharding.op.type][1:] if is_product else (0,):
            layout, need = self._layout(sharding.op.inputs[number].tensor), needs[number]
            share = layout.share(self._mesh, worker)
            for cell in (layout.axes[axis] for axis in sharding.summed_axes):
                assert cell is not None
                assert need is not None
                need = with_span(need, cell, (share.lo[cell], share.hi[cell]))
            needs[number] = need
        return tuple(needs)

    def _operand(self, sharding: OpSharding, number: int, share: Rect) -> Rect:
        """The part of operand `number` that belongs to the share of a loss's first operand; else whole."""
        if number == 0:
            return share
        reduction = sharding.rules[0].relation.reduction
        assert reduction is not None
        first, cells = (self._layout(sharding.op.inputs[n].tensor).cells for n in (0, number))
        dims = reduction.dims.get(number, ())
        spans: list[Span] = []
        for dim, group in enumerate(cells.groups):
            source = reduction.dims[0][dims.index(dim)] if dim in dims else None
            spans += [(0, size) for size in group] if source is None else first.spans(share, source)
        return Rect(tuple(low for low, _ in spans), tuple(high for _, high in spans))
