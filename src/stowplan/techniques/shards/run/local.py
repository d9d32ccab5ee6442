"""The actions of one worker: its levels of a plan, bound to the calls that compute them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod

import torch

from stowplan.capture import Captured, Ref
from stowplan.errors import BadUse
from stowplan.geometry import Rect
from stowplan.ir import Kind
from stowplan.ir import Tensor as Described
from stowplan.ops.regions.rules import dim_of
from stowplan.ops.table import shape_of, site_of
from stowplan.plan.level import Level as TileLevel
from stowplan.run.parts.losses import tiled_loss
from stowplan.run.parts.part import Index, LocalCall, index_of, index_within, local_call
from stowplan.techniques.shards.plan.cells import Cells
from stowplan.techniques.shards.plan.plan import RESIDENT, ShardPlan
from stowplan.techniques.shards.plan.propagation import CLASS_LOSSES, LOOKUPS, SUMMED, TOGETHER, ShardingKind
from stowplan.techniques.shards.plan.shard import LIKES, ShardLevel
from stowplan.techniques.shards.plan.traffic import is_differentiated
from stowplan.techniques.shards.plan.weights import PRODUCTS
from stowplan.techniques.shards.run.actions import (
    Action,
    Ahead,
    DrawOnWorker,
    EnterBucket,
    GatherParameters,
    LayOut,
    LocalProduct,
    Lookup,
    Loss,
    Make,
    Normalise,
    OwnPlaces,
    SoftmaxOverWorkers,
    Sum,
    SwapHalos,
)
from stowplan.techniques.shards.run.draws import is_drawn_in_pieces
from stowplan.techniques.shards.run.exchange import exchange_of
from stowplan.techniques.shards.run.norm import Norm
from stowplan.techniques.shards.run.operator import OUTSIDE, Collective, Total
from stowplan.techniques.shards.run.parameters import ParameterShards
from stowplan.techniques.shards.run.softmax import Softmax
from stowplan.techniques.shards.run.take import Blank, Take, take
from stowplan.techniques.shards.run.workers import Workers

_CONVOLUTION = "aten.convolution.default"


class LocalStep:
    """Builds the actions of this process's worker."""

    def __init__(
        self,
        captured: Captured,
        plan: ShardPlan,
        workers: Workers,
        buckets: Sequence[EnterBucket],
        parameters: ParameterShards | None = None,
    ) -> None:
        self._parameters = parameters
        gathers = parameters.gathers(plan) if parameters else ()
        self._buckets: list[EnterBucket | GatherParameters] = [*buckets, *gathers]  # that no op has read from
        self._read_at: dict[str, int] = {}  # by gathered parameter, the level that read it last
        self._trained = frozenset(captured.program.gradients)
        self._calls, self._graph = captured.program.calls, captured.graph
        self._plan, self._workers = plan, workers
        self._shard = plan.shards[workers.rank]
        self._exchanged = frozenset(plan.exchanged)
        self._rects: dict[str, Rect] = {}  # what is there of each tensor by now
        for name, tensor in self._graph.tensors.items():
            if tensor.kind in (*RESIDENT, Kind.INPUT):
                self._rects[name] = plan.layouts[name].share(plan.mesh, workers.rank)
        self._cut_weights = frozenset(plan.cut_weights)
        for name in self._cut_weights:
            nothing = Rect(self._rects[name].lo, self._rects[name].lo)
            self._rects[name] = self._shard.held.get(name, nothing)

    def actions(self) -> Iterator[Action]:
        """All of them, in order."""
        for name, tensor in self._graph.tensors.items():
            if tensor.kind is Kind.INPUT and name in self._exchanged:
                yield self._swap(name)
        later = {name for bucket in self._buckets for name in bucket.parameters}
        yield from self._laid_out(name for name in self._cut_weights if name not in later)
        for number, level in enumerate(self._shard.levels):
            yield from self._bring_for(level)
            yield from self._gather_again_for(level, number)
            yield from self._level(level)
            for name in self._names(level):
                if name in self._exchanged:
                    yield from self._swap_before_next(name, number)
        yield from self._buckets

    def _swap_before_next(self, name: str, number: int) -> Iterator[Action]:
        """The exchange of what level `number` made, before a convolution whose parameters come first."""
        ahead = self._ahead(name, number) if name in self._plan.differentiated else None
        if ahead is None:
            yield self._swap(name)
            return
        yield from self._bring_for(ahead)
        yield from self._gather_again_for(ahead, self._shard.levels.index(ahead))
        yield self._swap(name, None if ahead.made.is_empty else self._described_ahead(ahead))

    def _ahead(self, name: str, number: int) -> ShardLevel | None:
        """The next convolution that reads what is made of a tensor, if no collective comes before it.

        It is the same on all workers. Its weight must be a parameter that is read as it is.
        """
        made_of = {name}
        for level in self._shard.levels[number + 1 :]:
            op = level.sharding.op
            if level.sharding.kind in (ShardingKind.SUMS, ShardingKind.NORM):
                return None
            if op.type == _CONVOLUTION and op.inputs[0].tensor in made_of:
                parameters = [use.tensor for use in op.inputs[1:]]
                is_plain = all(
                    self._described(each).kind is Kind.PARAMETER and each not in self._cut_weights
                    for each in parameters
                )
                return level if is_plain and parameters[0] in self._trained else None
            if not self._exchanged.isdisjoint(self._names(level)):
                return None
            if not made_of.isdisjoint(op.reads()):
                made_of.update(op.writes())
        return None

    @staticmethod
    def _described_ahead(level: ShardLevel) -> Ahead:
        weight, *bias = (use.tensor for use in level.sharding.op.inputs[1:])
        return Ahead(level.name, weight, bias[0] if bias else None)

    def _gather_again_for(self, level: ShardLevel, number: int) -> Iterator[GatherParameters | LayOut]:
        """A parameter that was read long ago, as a tied embedding is by the head, is not kept until here.

        Its gradients are then summed use by use, so that none waits for the other.
        """
        if self._parameters is None:
            return
        for name in dict.fromkeys(level.sharding.op.reads()):
            if self._described(name).kind is Kind.PARAMETER:
                if number - self._read_at.get(name, number) > len(self._shard.levels) // 2:
                    yield self._parameters.gather((name,), self._plan)
                    yield from self._laid_out([name])
                self._read_at[name] = number

    def _bring_for(self, level: ShardLevel) -> Iterator[EnterBucket | GatherParameters | LayOut]:
        """Buckets up to the last that the op reads from, on all workers alike, even those that do nothing."""
        read = set(level.sharding.op.reads())
        while any(not read.isdisjoint(bucket.parameters) for bucket in self._buckets):
            bucket = self._buckets.pop(0)
            yield bucket
            yield from self._laid_out(bucket.parameters)

    def _laid_out(self, parameters: Iterable[str]) -> Iterator[LayOut]:
        """The parts of weights that an axis cuts. Of shards, this part alone is gathered."""
        for name in sorted(self._cut_weights.intersection(parameters)):
            held, sizes = self._rects[name], self._cells(name).sizes
            is_part = self._parameters is not None
            yield LayOut(name, held.shape if is_part else sizes, None if is_part else index_of(held))

    def _names(self, level: ShardLevel) -> Sequence[str]:
        together = level.sharding.kind in TOGETHER
        return [use.tensor for use in level.sharding.op.outputs] if together else [level.name]

    def _level(self, level: ShardLevel) -> Iterator[Action]:
        self._rects.update((name, self._shard.made[name]) for name in self._names(level))
        if level.sharding.kind is ShardingKind.NORM:
            yield self._norm(level)
        elif level.sharding.kind is ShardingKind.SOFTMAX:
            yield self._softmax(level)
        elif level.sharding.kind is ShardingKind.SUMS and level.sharding.op.type in LOOKUPS:
            yield self._lookup(level)
        elif level.sharding.kind is ShardingKind.SUMS and level.sharding.op.type in SUMMED:
            yield self._sum(level)
        elif level.sharding.op.type in PRODUCTS and level.sharding.kind is ShardingKind.SUMS:
            yield self._product(level)
        elif level.sharding.kind is ShardingKind.SUMS:
            yield self._loss(level)
        elif not level.made.is_empty:
            yield self._make(level)

    def _cells(self, name: str) -> Cells:
        return self._plan.layouts[name].cells

    def _described(self, name: str) -> Described:
        return self._graph.tensors[name]

    def _blank(self, name: str) -> Blank:
        """Nothing of a tensor: what a worker's share looks like, in zeros."""
        share = self._plan.layouts[name].share(self._plan.mesh, self._workers.rank)
        return Blank(self._described(name), share.shape)

    def _take(self, name: str, wanted: Rect, flat: Rect | None = None) -> Take:
        return take(name, self._cells(name), self._rects[name], wanted, flat)

    def _swap(self, name: str, ahead: Ahead | None = None) -> SwapHalos:
        exchange = exchange_of(self._plan, self._workers, name)
        collective = Collective(f"{name} {exchange.share} to {exchange.held}", exchange)
        held = self._shard.held.get(name)
        self._rects[name] = Rect(self._rects[name].lo, self._rects[name].lo) if held is None else held
        return SwapHalos(name, collective, self._blank(name), ahead)

    def _make(self, level: ShardLevel) -> Make | DrawOnWorker:
        op = level.sharding.op
        if self._calls[op.id].fresh:
            raise BadUse(f"{op.id} ({op.type}) overwrites its input, and has no kernel on a part")
        takes: dict[str, Take | Blank] = {}
        seen: list[Rect | None] = []
        held: dict[str, Rect] = {}
        for number, use in enumerate(op.inputs):
            found, rect = self._operand(level, number)
            seen.append(rect)
            if found is not None and rect is not None:
                part = rect.clip(shape_of(self._described(use.tensor)))
                if held.setdefault(use.tensor, part) != part:
                    raise BadUse(f"{op.id} ({op.type}) reads two different parts of {use.tensor!r}")
                takes[use.tensor] = found
        tile = TileLevel(op, level.output, self._cells(level.name).local(level.made), tuple(seen))
        call, kept = local_call(self._graph, self._calls[op.id], tile, held), self._kept(level)
        if kept is not None and is_drawn_in_pieces(call, self._described(level.name).device):
            return self._draw(call, level, kept)
        return Make(call, takes, level.made.shape, kept)

    def _draw(self, call: LocalCall, level: ShardLevel, kept: Index) -> DrawOnWorker:
        chance, dtype = call.arguments["p"], getattr(torch, str(self._described(level.name).dtype))
        assert isinstance(chance, (int, float))
        return DrawOnWorker(level.name, float(chance), level.made.shape, kept, dtype)

    def _operand(self, level: ShardLevel, number: int) -> tuple[Take | Blank | None, Rect | None]:
        """Where an input comes from, and its rect as the op sees it; what only tells a shape is blank."""
        name, need = level.sharding.op.inputs[number].tensor, level.needs[number]
        described, cells = self._described(name), self._cells(name)
        if need is None:
            if level.sharding.kind is not ShardingKind.ANYWHERE:
                return None, None
            is_like = level.sharding.op.type in LIKES
            shape = level.made.shape if is_like else shape_of(described)
            return Blank(described, shape), Rect.of_shape(shape)
        seen = level.sharding.rules[level.output].seen(number, level.made, need, cells)
        return self._take(name, need.clip(cells.sizes), seen.clip(shape_of(described))), seen

    def _kept(self, level: ShardLevel) -> Index | None:
        """The part that is held of a result that was made whole because the op makes no parts."""
        held = self._shard.held.get(level.name)
        if level.name in self._exchanged or held is None or held == level.made:
            return None
        self._rects[level.name] = held
        return index_within(held, level.made)

    def _total(self, level: ShardLevel) -> Collective:
        """The sum over workers that a level takes part in."""
        total = Total(self._workers, level.sharding.summed_axes, is_differentiated(self._plan, level))
        return Collective(level.name, total)

    def _sum(self, level: ShardLevel) -> Sum:
        source, reduction = level.sharding.op.inputs[0].tensor, level.sharding.rules[0].relation.reduction
        need = level.needs[0]
        assert reduction is not None
        assert need is not None
        dims = tuple(dim for dim in reduction.dims[0] if dim is not None)
        shape = shape_of(self._described(source))
        divisor = prod(shape[dim] for dim in dims) if ".mean." in level.sharding.op.type else 1
        part = None if need.is_empty else self._take(source, need)
        return Sum(
            level.name, part, dims, level.made.shape, divisor, self._total(level), self._blank(level.name)
        )

    def _product(self, level: ShardLevel) -> LocalProduct:
        op, cells = level.sharding.op, self._cells(level.name)
        added, *factors = PRODUCTS[op.type]
        needs = {n: need for n, need in enumerate(level.needs) if need is not None}
        left, right = (self._take(op.inputs[n].tensor, needs[n]) for n in factors)
        return LocalProduct(
            level.name,
            None if any(needs[n].is_empty for n in factors) else (left, right),
            None if added is None else self._take(op.inputs[added].tensor, needs[added]),
            level.made.shape,
            self._total(level),
            Blank(self._described(level.name), cells.local(level.made).shape),
        )

    def _loss(self, level: ShardLevel) -> Loss:
        op = level.sharding.op
        empty = any(need is None or need.is_empty for need in level.needs)
        pairs = zip(op.inputs, level.needs, strict=True)
        takes = None if empty else tuple(self._take(u.tensor, n) for u, n in pairs if n is not None)
        call, own = self._calls[op.id], None
        loss = tiled_loss(call)
        if op.type in CLASS_LOSSES:
            ignored = call.arguments()["ignore_index"]
            assert isinstance(ignored, int)
            own = self._own_places(op.inputs[0].tensor, 1, level.needs[0], ignored)
            if own is not None:
                loss = replace(loss, arguments={**loss.arguments, "ignore_index": OUTSIDE})
        return Loss(call.outputs, takes, loss, self._total(level), self._blank(level.name), own)

    def _own_places(
        self, name: str, dim: int, need: Rect | None, ignored: int | None = None
    ) -> OwnPlaces | None:
        """The indices along a dim that are this worker's; None if no axis cuts the dim."""
        layout = self._plan.layouts[name]
        cell = layout.cells.first(dim)
        if cell not in layout.cut_cells:
            return None
        assert need is not None
        return OwnPlaces(need.lo[cell], need.hi[cell], layout.cells.sizes[cell], ignored)

    def _lookup(self, level: ShardLevel) -> Lookup:
        op = level.sharding.op
        table, indices = (use.tensor for use in op.inputs)
        rows, picked = level.needs
        own = self._own_places(table, 0, rows)
        assert own is not None
        assert rows is not None
        assert picked is not None
        padding = self._calls[op.id].arguments().get("padding_idx", -1)
        assert isinstance(padding, int)
        return Lookup(
            level.name,
            None if rows.is_empty or picked.is_empty else self._take(table, rows),
            self._take(indices, picked),
            own,
            padding - own.low if own.low <= padding < own.high else -1,
            level.made.shape,
            self._total(level),
            self._blank(level.name),
        )

    def _softmax(self, level: ShardLevel) -> SoftmaxOverWorkers:
        op, (need,) = level.sharding.op, level.needs
        name = op.inputs[0].tensor
        assert need is not None
        shape = self._cells(name).local(need).shape
        operation = Softmax(
            self._workers,
            level.sharding.summed_axes,
            dim_of(site_of(self._graph, op), len(shape)),
            "log" in op.type,
            getattr(torch, str(self._described(level.name).dtype)),
            is_differentiated(self._plan, level),
        )
        scores = Blank(self._described(name), shape) if need.is_empty else self._take(name, need)
        return SoftmaxOverWorkers(level.name, scores, level.made.shape, Collective(level.name, operation))

    def _norm(self, level: ShardLevel) -> Normalise:
        op, call = level.sharding.op, self._calls[level.sharding.op.id]
        bound = call.arguments()
        name, need = op.inputs[0].tensor, level.needs[0]
        assert need is not None
        cells = self._cells(name)
        local = cells.local(need)
        counted = self._plan.layouts[name].share(self._plan.mesh, self._workers.rank)
        groups, eps = bound.get("group"), bound["eps"]
        assert isinstance(eps, float)
        count = self._count(level, groups)
        space = None if counted.is_empty else index_within(cells.local(counted), local)
        norm = Norm(self._workers, level.sharding.summed_axes, _grouped(space, groups), count, eps)
        momentum = bound.get("momentum", 0.0)
        return Normalise(
            names=(None, *call.outputs[1:]) if level.made.is_empty else call.outputs,
            image=Blank(self._described(name), local.shape) if need.is_empty else self._take(name, need),
            vectors={
                key: self._channels(value.tensor, name, need)
                for key, value in bound.items()
                if key in _VECTORS and isinstance(value, Ref)
            },
            groups=groups if isinstance(groups, int) else None,
            made=None if level.made == need else _part(cells.local(level.made), local),
            shape=level.made.shape,
            momentum=momentum if isinstance(momentum, float) else 0.0,
            unbiased=count / max(1, count - 1),
            eps=eps,
            collective=Collective(level.name, norm),
        )

    def _count(self, level: ShardLevel, groups: object) -> int:
        """How many values each statistic is of, over all workers."""
        shape = shape_of(self._described(level.sharding.op.inputs[0].tensor))
        if isinstance(groups, int):
            return prod(shape[1:]) // groups
        return prod(shape) // shape[1]

    def _channels(self, vector: str, image: str, need: Rect) -> Take:
        """The entries of a vector over channels that belong to the channels of a part of an image."""
        cells = self._cells(image)
        flat = cells.flat(need)
        if (flat.hi[1] - flat.lo[1]) != cells.local(need).shape[1]:
            raise BadUse(f"a worker has scattered channels of {image!r}, which {vector!r} cannot follow")
        return self._take(vector, Rect((flat.lo[1],), (flat.hi[1],)))


_VECTORS = ("weight", "bias", "running_mean", "running_var")


def _part(part: Rect, whole: Rect) -> Index:
    return tuple(slice(0, 0) for _ in part.lo) if part.is_empty else index_within(part, whole)


def _grouped(space: Index | None, groups: object) -> Index | None:
    """The counted part of an image whose groups of channels stand for channels."""
    if space is None or not isinstance(groups, int):
        return space
    return (slice(None), slice(None), slice(None), *space[2:])
