"""Shard: what one worker makes and holds of every tensor, pulled back from what its ops need.

What a worker needs beyond its share it makes itself where that is cheap (the halo of a ReLU is the ReLU of a
halo): then it is exchanged once, before the first such op, and never stored twice. Else it is received.

Halos of convolutions: computed by the worker that needs them, or received, whichever takes less time.

A computed halo takes multiply-accumulates, forward and twice as many backward. A received halo takes two
messages, and copies of the held part, forward and backward. Both costs are in multiply-accumulates, because
their ratio differs less from machine to machine than seconds do, and all workers must decide alike.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from stowplan.geometry import Rect
from stowplan.ir import Op
from stowplan.ops import aten
from stowplan.ops.effects import Effect, effect_of, macs_of
from stowplan.ops.regions.relation import with_span
from stowplan.ops.table import Site, shape_of, site_of
from stowplan.ops.windows import Span
from stowplan.plan.shards.allowed import look_of, refusal_of_parts
from stowplan.plan.shards.layout import Layout
from stowplan.plan.shards.propagation import (
    LOOKUPS,
    SUMMED,
    TOGETHER,
    OpSharding,
    ShardingKind,
    ShardPropagation,
)
from stowplan.plan.shards.weights import PRODUCTS

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
class Level:
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

    levels: tuple[Level, ...]
    made: Mapping[str, Rect]
    held: Mapping[str, Rect]


class Pulling:
    """Pulls demands back through the ops for several workers at once: some decisions are theirs together."""

    def __init__(self, propagated: ShardPropagation, ends: Sequence[str], workers: Sequence[int]) -> None:
        self._found, self._mesh = propagated, propagated.mesh
        self._workers = tuple(workers)
        self._known_shares: dict[Layout, list[Rect]] = {}
        self._alike: dict[Hashable, int] = {}  # a number for ops that look alike, by all that rules depend on
        self._pulled: dict[tuple[int, Rect], tuple[Rect | None, ...]] = {}  # by that number and part
        self._possible: set[tuple[int, frozenset[Rect]]] = set()  # parts that such ops can make
        self._needed: list[dict[str, Rect]] = [{} for _ in self._workers]
        self._made: list[dict[str, Rect]] = [{} for _ in self._workers]
        self._levels: list[list[Level]] = [[] for _ in self._workers]
        for name in ends:
            for place, share in enumerate(self._shares(self._layout(name))):
                self._need(place, name, share)

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
        return Shard(tuple(reversed(self._levels[place])), self._made[place], self._needed[place])

    def _layout(self, name: str) -> Layout:
        return self._found.layouts[name]

    def _need(self, place: int, name: str, rect: Rect | None) -> None:
        if rect is not None:
            part = rect.clip(self._layout(name).cells.sizes)
            known = self._needed[place].get(name)
            self._needed[place][name] = part if known is None else known.hull(part)

    def _take(self, sharding: OpSharding, number: int) -> None:
        name = sharding.op.outputs[number].tensor
        draws = number == 0 and self._draws(sharding.op)
        if not draws and not any(name in needed for needed in self._needed):
            return
        parts, look = self._parts_made(sharding, number, name, draws), self._look(sharding, number)
        for place, made in enumerate(parts):
            if (look, made) not in self._pulled:
                self._pulled[look, made] = sharding.rules[number].pull(made)
            self._made[place][name] = made
            self._append(place, Level(sharding, number, made, self._pulled[look, made]))

    def _look(self, sharding: OpSharding, number: int) -> int:
        """The same for outputs of ops that look alike and have layouts alike."""
        op, layouts = sharding.op, self._found.layouts
        inputs = tuple(layouts[use.tensor] for use in op.inputs)
        known = look_of(site_of(self._found.graph, op)), number, layouts[op.outputs[number].tensor], inputs
        return self._alike.setdefault(known, len(self._alike))

    def _append(self, place: int, level: Level) -> None:
        self._levels[place].append(level)
        for use, need in zip(level.sharding.op.inputs, level.needs, strict=True):
            self._need(place, use.tensor, need)

    def _take_together(self, sharding: OpSharding) -> None:
        """Sums and statistics: all workers take part, whatever they need, and all outputs come at once."""
        names = [use.tensor for use in sharding.op.outputs]
        if not any(name in needed for needed in self._needed for name in names):
            return
        for place, worker in enumerate(self._workers):
            made = self._made[place]
            made.update((name, self._layout(name).share(self._mesh, worker)) for name in names)
            if sharding.kind is ShardingKind.NORM:
                made[names[0]] = self._needed[place].get(names[0], _nothing_of(made[names[0]]))
            needs = self._counted(sharding, made[names[0]], worker)
            self._append(place, Level(sharding, 0, made[names[0]], needs))

    def _draws(self, op: Op) -> bool:
        return bool(effect_of(site_of(self._found.graph, op)) & Effect.RANDOM)

    def _parts_made(self, sharding: OpSharding, number: int, name: str, draws: bool) -> list[Rect]:
        layout = self._layout(name)
        shares = self._shares(layout)
        wanted = [needed.get(name, _nothing_of(shares[p])) for p, needed in enumerate(self._needed)]
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
        known = self._look(sharding, number), frozenset(made)
        if known in self._possible:
            return True
        site = site_of(self._found.graph, sharding.op)
        cells = [self._layout(use.tensor).cells for use in sharding.op.inputs]
        layout = self._layout(sharding.op.outputs[number].tensor)
        refusal = refusal_of_parts(site, number, sharding.rules[number], layout, cells)
        can = not any(map(refusal, set(made)))
        self._possible.update((known,) if can else ())
        return can

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


def _nothing_of(rect: Rect) -> Rect:
    return Rect(rect.lo, rect.lo)
