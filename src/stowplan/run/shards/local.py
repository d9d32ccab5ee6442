"""The actions of one worker: its levels of a plan, bound to the calls that compute them."""

from collections.abc import Iterator, Sequence
from math import prod

import torch

from stowplan.capture import Captured, Ref
from stowplan.errors import BadUse
from stowplan.geometry import Rect
from stowplan.ir import Kind
from stowplan.ir import Tensor as Described
from stowplan.ops.table import shape_of
from stowplan.plan.level import Level as TileLevel
from stowplan.plan.shards.cells import Cells
from stowplan.plan.shards.plan import RESIDENT, ShardPlan
from stowplan.plan.shards.propagation import SUMMED, ShardingKind
from stowplan.plan.shards.shard import LIKES, Level
from stowplan.run.parts.losses import tiled_loss
from stowplan.run.parts.part import Index, LocalCall, local_call
from stowplan.run.shards.actions import (
    Action,
    Draw,
    EnterBucket,
    GatherParameters,
    Loss,
    Make,
    Normalise,
    Sum,
    Swap,
)
from stowplan.run.shards.draws import is_drawn_in_pieces
from stowplan.run.shards.exchange import exchange_of
from stowplan.run.shards.norm import Norm
from stowplan.run.shards.operator import Collective, Total
from stowplan.run.shards.parameters import ParameterShards
from stowplan.run.shards.take import Blank, Take, take, within
from stowplan.run.shards.workers import Workers


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
        self._parameters, self._in_order = parameters, not plan.is_alike
        gathers = parameters.gathers(in_order=self._in_order) if parameters else ()
        self._buckets: list[EnterBucket | GatherParameters] = [*buckets, *gathers]  # that no op has read from
        self._read_at: dict[str, int] = {}  # by gathered parameter, the level that read it last
        self._calls, self._graph = captured.program.calls, captured.graph
        self._plan, self._workers = plan, workers
        self._shard = plan.shards[workers.rank]
        self._exchanged = frozenset(plan.exchanged)
        self._rects: dict[str, Rect] = {}  # what is there of each tensor by now
        for name, tensor in self._graph.tensors.items():
            if tensor.kind in (*RESIDENT, Kind.INPUT):
                self._rects[name] = plan.layouts[name].share(plan.mesh, workers.rank)

    def actions(self) -> Iterator[Action]:
        """All of them, in order."""
        for name, tensor in self._graph.tensors.items():
            if tensor.kind is Kind.INPUT and name in self._exchanged:
                yield self._swap(name)
        for number, level in enumerate(self._shard.levels):
            yield from self._bring_for(level)
            yield from self._gather_again_for(level, number)
            yield from self._level(level)
            for name in self._names(level):
                if name in self._exchanged:
                    yield self._swap(name)
        yield from self._buckets

    def _gather_again_for(self, level: Level, number: int) -> Iterator[GatherParameters]:
        """A parameter that was read long ago, as a tied embedding is by the head, is not kept until here.

        Its gradients are then summed use by use, so that none waits for the other.
        """
        if self._parameters is None:
            return
        for name in dict.fromkeys(level.sharding.op.reads()):
            if self._described(name).kind is Kind.PARAMETER:
                if number - self._read_at.get(name, number) > len(self._shard.levels) // 2:
                    yield self._parameters.gather((name,), in_order=self._in_order)
                self._read_at[name] = number

    def _bring_for(self, level: Level) -> Iterator[EnterBucket | GatherParameters]:
        """Buckets up to the last that the op reads from, on all workers alike, even those that do nothing."""
        read = set(level.sharding.op.reads())
        while any(not read.isdisjoint(bucket.parameters) for bucket in self._buckets):
            yield self._buckets.pop(0)

    def _names(self, level: Level) -> Sequence[str]:
        together = level.sharding.kind in (ShardingKind.SUMS, ShardingKind.NORM)
        return [use.tensor for use in level.sharding.op.outputs] if together else [level.name]

    def _level(self, level: Level) -> Iterator[Action]:
        self._rects.update((name, self._shard.made[name]) for name in self._names(level))
        if level.sharding.kind is ShardingKind.NORM:
            yield self._norm(level)
        elif level.sharding.kind is ShardingKind.SUMS and level.sharding.op.type in SUMMED:
            yield self._sum(level)
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

    def _swap(self, name: str) -> Swap:
        exchange = exchange_of(self._plan, self._workers, name)
        collective = Collective(f"{name} {exchange.share} to {exchange.held}", exchange)
        held = self._shard.held.get(name)
        self._rects[name] = Rect(self._rects[name].lo, self._rects[name].lo) if held is None else held
        return Swap(name, collective, self._blank(name))

    def _make(self, level: Level) -> Make | Draw:
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

    def _draw(self, call: LocalCall, level: Level, kept: Index) -> Draw:
        chance, dtype = call.arguments["p"], getattr(torch, str(self._described(level.name).dtype))
        assert isinstance(chance, (int, float))
        return Draw(level.name, float(chance), level.made.shape, kept, dtype)

    def _operand(self, level: Level, number: int) -> tuple[Take | Blank | None, Rect | None]:
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

    def _kept(self, level: Level) -> Index | None:
        """The part that is held of a result that was made whole because the op makes no parts."""
        held = self._shard.held.get(level.name)
        if level.name in self._exchanged or held is None or held == level.made:
            return None
        self._rects[level.name] = held
        return within(held, level.made)

    def _total(self, level: Level) -> Collective:
        """The sum over workers that a level takes part in."""
        axes = level.sharding.summed_axes
        differentiated = level.sharding.op.inputs[0].tensor in self._plan.differentiated
        return Collective(level.name, Total(self._workers, axes, differentiated))

    def _sum(self, level: Level) -> Sum:
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

    def _loss(self, level: Level) -> Loss:
        op = level.sharding.op
        empty = any(need is None or need.is_empty for need in level.needs)
        pairs = zip(op.inputs, level.needs, strict=True)
        takes = None if empty else tuple(self._take(u.tensor, n) for u, n in pairs if n is not None)
        call = self._calls[op.id]
        return Loss(call.outputs, takes, tiled_loss(call), self._total(level), self._blank(level.name))

    def _norm(self, level: Level) -> Normalise:
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
        space = None if counted.is_empty else within(cells.local(counted), local)
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

    def _count(self, level: Level, groups: object) -> int:
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
    return tuple(slice(0, 0) for _ in part.lo) if part.is_empty else within(part, whole)


def _grouped(space: Index | None, groups: object) -> Index | None:
    """The counted part of an image whose groups of channels stand for channels."""
    if space is None or not isinstance(groups, int):
        return space
    return (slice(None), slice(None), slice(None), *space[2:])
