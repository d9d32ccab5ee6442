"""Actions: what a worker does, one after the other, in the forward half: calls, exchanges, sums, norms.

Causal attention of some queries reads keys up to the last of them, under a mask that knows their places.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from stowplan.ir import Shape
from stowplan.run.parts.kernels import run_local
from stowplan.run.parts.losses import TiledLoss
from stowplan.run.parts.part import Index, LocalCall, call_with
from stowplan.techniques.shards.run.functions import Bucketed, Gathered, GatheredInOrder
from stowplan.techniques.shards.run.operator import (
    Collective,
    bucket_placeholder,
    exchange,
    norm,
    own_places,
    quotient,
    softmax,
    total,
)
from stowplan.techniques.shards.run.overlap import Overlap, begin_overlap, convolved
from stowplan.techniques.shards.run.take import Blank, Take

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def is_causal_part(call: LocalCall) -> bool:
    """Whether a call's own causal mask would count from the first query that it is given."""
    return call.target is _FLASH and bool(call.arguments["is_causal"]) and call.made.lo[-2] > 0


def causal_part(call: LocalCall, given: Mapping[str, Tensor]) -> Tensor:
    """The attended values of queries that begin at `call.made`."""
    arguments = call.given(given)
    query = arguments["query"]
    assert isinstance(query, Tensor)
    first, last = call.made.lo[-2], call.made.hi[-2]
    blocked = torch.ones(last - first, last, dtype=torch.bool, device=query.device).triu(first + 1)
    mask = torch.zeros_like(blocked, dtype=query.dtype).masked_fill(blocked, float("-inf"))
    made: tuple[Tensor, Tensor] = call_with(call.target, {**arguments, "is_causal": False, "attn_mask": mask})  # type: ignore[assignment]
    return made[0]


_bucketed: Any = Bucketed.apply
_gathered: Any = Gathered.apply
_gathered_in_order: Any = GatheredInOrder.apply


@dataclass(slots=True)
class LocalValues:
    """The tensors of a worker while its step runs: parts by tensor, and the token that orders its messages.

    `flats` has a flat tensor for each bucket whose parameters are still unused. If it is empty, a placeholder
    stands in the step for each bucket, and the parameters are used without buckets. `given` are the tensors
    that the step was called with. `overlapped` are for convolutions whose weights get their gradients while
    halos travel.
    """

    parts: dict[str, Tensor]
    token: Tensor
    flats: list[Tensor]
    given: Mapping[str, Tensor]
    overlapped: dict[str, tuple[Overlap, Tensor]] = field(default_factory=dict)  # by convolution's output
    overlaps: bool = True  # else nothing overlaps: the step may be captured a second time


@dataclass(frozen=True, slots=True)
class EnterBucket:
    """Enters the next bucket, before its first parameter is used: backward has all its gradients by then."""

    parameters: tuple[str, ...]
    collective: Collective

    def touches(self) -> Iterable[str]:
        return self.parameters

    def run(self, values: LocalValues) -> None:
        if not values.flats:
            values.token = bucket_placeholder(values.token, self.collective.key)
            return
        given = [values.parts[name] for name in self.parameters]
        values.token, *parameters = entered(self.collective, values.flats.pop(0), values.token, given)
        values.parts.update(zip(self.parameters, parameters, strict=True))


@dataclass(frozen=True, slots=True)
class GatherParameters:
    """Makes whole parameters of their shards, before an op that reads one of them.

    Between workers that have plans of their own, gathers are `in_order` with all other messages.
    """

    parameters: tuple[str, ...]
    collective: Collective
    in_order: bool

    def touches(self) -> Iterable[str]:
        return self.parameters

    def run(self, values: LocalValues) -> None:
        shards = [values.given[name] for name in self.parameters]
        if self.in_order:
            *wholes, values.token = _gathered_in_order(self.collective, values.token, *shards)
        else:
            wholes = _gathered(self.collective, *shards)
        values.parts.update(zip(self.parameters, wholes, strict=True))


def entered(
    collective: Collective, flat: Tensor, token: Tensor, parameters: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The next token, and the parameters of a bucket, whose gradients are summed over the workers."""
    found: tuple[Tensor, ...] = _bucketed(flat, token, collective, *(p.detach() for p in parameters))
    return found


@dataclass(frozen=True, slots=True)
class Make:
    """An op on parts. `kept` is what is held of a result that could only be made whole."""

    call: LocalCall
    takes: Mapping[str, Take | Blank]
    shape: Shape
    kept: Index | None

    def touches(self) -> Iterable[str]:
        return *self.takes, self.call.name

    def run(self, values: LocalValues) -> None:
        given = {name: take.of(values.parts) for name, take in self.takes.items()}
        made = self._made(given, values.overlapped.pop(self.call.name, None))
        made = made if made.shape == self.shape else made.reshape(self.shape)
        values.parts[self.call.name] = made if self.kept is None else made[self.kept].clone()

    def _made(self, given: Mapping[str, Tensor], overlap: tuple[Overlap, Tensor] | None) -> Tensor:
        if overlap is not None:
            return run_local(replace(self.call, by=partial(convolved, *overlap)), given)
        return causal_part(self.call, given) if is_causal_part(self.call) else run_local(self.call, given)


@dataclass(frozen=True, slots=True)
class DrawOnWorker:
    """The part `kept` of random numbers that are drawn for the whole."""

    tensor: str
    chance: float
    whole: Shape
    kept: Index
    dtype: torch.dtype

    def touches(self) -> Iterable[str]:
        return (self.tensor,)

    def run(self, values: LocalValues) -> None:
        low, sizes = [part.start for part in self.kept], [part.stop - part.start for part in self.kept]
        drawn = torch.ops.stowplan.draw(self.chance, self.whole, low, sizes, self.dtype)
        values.parts[self.tensor] = drawn


@dataclass(frozen=True, slots=True)
class Ahead:
    """The convolution after an exchange: what it makes, its weight and its bias."""

    made: str
    weight: str
    bias: str | None

    def touches(self) -> Iterable[str]:
        return filter(None, (self.weight, self.bias))


@dataclass(frozen=True, slots=True)
class SwapHalos:
    """The exchange of one tensor; a worker that has nothing of it brings an empty part.

    Backward, the gradient of the weight `ahead` is computed while messages travel.
    """

    tensor: str
    collective: Collective
    nothing: Blank
    ahead: Ahead | None = None

    def touches(self) -> Iterable[str]:
        return self.tensor, *(self.ahead.touches() if self.ahead else ())

    def run(self, values: LocalValues) -> None:
        share = values.parts.get(self.tensor)
        share = self.nothing.zeros() if share is None else share
        if self.ahead is None or not values.overlaps or not share.requires_grad:
            values.parts[self.tensor], values.token = exchange(share, values.token, self.collective.key)
            return
        bias = None if self.ahead.bias is None else values.parts[self.ahead.bias]
        overlap, weight = Overlap(self.collective), values.parts[self.ahead.weight]
        held, values.token, weighed = begin_overlap(overlap, share, values.token, weight, bias)
        values.parts[self.tensor], values.overlapped[self.ahead.made] = held, (overlap, weighed)


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum or mean over dims of which each worker has a part."""

    tensor: str
    take: Take | None  # None where the worker has nothing of it
    dims: tuple[int, ...]
    shape: Shape
    divisor: int
    collective: Collective
    nothing: Blank

    def touches(self) -> Iterable[str]:
        return self.tensor, *(() if self.take is None else (self.take.tensor,))

    def run(self, values: LocalValues) -> None:
        part = self.nothing.zeros()
        if self.take is not None:
            part = self.take.of(values.parts).sum(self.dims, dtype=part.dtype).reshape(self.shape)
        summed, values.token = total(part, values.token, self.collective.key)
        values.parts[self.tensor] = summed if self.divisor == 1 else summed / self.divisor


@dataclass(frozen=True, slots=True)
class LocalProduct:
    """A product over an inner dim of which each worker has a part, plus what is added to it."""

    tensor: str
    factors: tuple[Take, Take] | None  # None where the worker has nothing of the inner dim
    added: Take | None
    shape: Shape
    collective: Collective
    nothing: Blank

    def touches(self) -> Iterable[str]:
        return self.tensor, *(take.tensor for take in (*(self.factors or ()), self.added) if take is not None)

    def run(self, values: LocalValues) -> None:
        if self.factors is None:
            part = self.nothing.zeros()
        else:
            left, right = (take.of(values.parts) for take in self.factors)
            part = left.mm(right)
        summed, values.token = total(part, values.token, self.collective.key)
        if self.added is not None:
            summed = summed + self.added.of(values.parts)
        values.parts[self.tensor] = summed.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class OwnPlaces:
    """Which of the indices along a dim are a worker's: those of its span, except one that is ignored."""

    low: int
    high: int
    size: int  # of the dim
    ignored: int | None = None

    def of(self, indices: Tensor) -> Tensor:
        """Indices as places in the worker's part; OUTSIDE for others."""
        found: Tensor = own_places(indices, self.low, self.high, self.size, self.ignored)
        return found


@dataclass(frozen=True, slots=True)
class Lookup:
    """Rows of a table of which each worker has a part: zeros for the rows of others, and then the sum."""

    tensor: str
    table: Take | None  # None where the worker has nothing of it
    indices: Take
    own: OwnPlaces
    padding: int  # the row that gets no gradient; -1 for none
    shape: Shape
    collective: Collective
    nothing: Blank

    def touches(self) -> Iterable[str]:
        return self.tensor, self.indices.tensor, *(() if self.table is None else (self.table.tensor,))

    def run(self, values: LocalValues) -> None:
        part = self.nothing.zeros()
        if self.table is not None:
            places = self.own.of(self.indices.of(values.parts))
            table, is_other = self.table.of(values.parts), (places < 0).unsqueeze(-1)
            picked = torch.ops.aten.embedding(table, places.clamp(min=0), self.padding)
            part = picked.masked_fill(is_other, 0).reshape(self.shape)
        values.parts[self.tensor], values.token = total(part, values.token, self.collective.key)


@dataclass(frozen=True, slots=True)
class SoftmaxOverWorkers:
    """A softmax, or its logarithm, along a dim of which each worker has a part."""

    tensor: str
    scores: Take | Blank
    shape: Shape
    collective: Collective

    def touches(self) -> Iterable[str]:
        return self.tensor, *((self.scores.tensor,) if isinstance(self.scores, Take) else ())

    def run(self, values: LocalValues) -> None:
        scores = self.scores.of(values.parts)
        made, values.token = softmax(scores, values.token, self.collective.key)
        values.parts[self.tensor] = made.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class LayOut:
    """The part of a parameter that a worker reads, with cells for dims; `index` if the whole is there."""

    parameter: str
    sizes: Shape
    index: Index | None

    def touches(self) -> Iterable[str]:
        return (self.parameter,)

    def run(self, values: LocalValues) -> None:
        part = values.parts[self.parameter].reshape(self.sizes)
        values.parts[self.parameter] = part if self.index is None else part[self.index]


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss as the quotient of two sums, which are added up over the workers.

    `own` are the classes of this worker, if workers divide them: other labels are ignored here.
    """

    names: tuple[str | None, ...]
    takes: tuple[Take, ...] | None
    loss: TiledLoss
    collective: Collective
    nothing: Blank
    own: OwnPlaces | None = None

    def touches(self) -> Iterable[str]:
        return *filter(None, self.names), *(take.tensor for take in self.takes or ())

    def run(self, values: LocalValues) -> None:
        nothing = self.nothing.zeros()
        part = nothing.new_zeros(2, dtype=torch.float64)
        if self.takes is not None:
            operands = [take.of(values.parts) for take in self.takes]
            if self.own is not None:
                operands[1:] = self._of_own_classes(self.own, *operands[1:])
            found = self.loss.summed(operands), self.loss.weight(operands)
            part = torch.stack([number.to(torch.float64) for number in found])
        summed, values.token = total(part, values.token, self.collective.key)
        loss = quotient(summed) if self.loss.divides else summed[0]
        for name, value in zip(self.names, (loss, summed[1]), strict=False):
            if name is not None:
                values.parts[name] = value.to(nothing.dtype)

    @staticmethod
    def _of_own_classes(own: OwnPlaces, labels: Tensor, *weights: Tensor) -> list[Tensor]:
        """Labels among the worker's classes, and the weights of these classes."""
        return [own.of(labels), *(weight[own.low : own.high] for weight in weights)]


@dataclass(frozen=True, slots=True)
class Normalise:
    """A norm whose statistics run over workers. `made` is the part of the result that is held."""

    names: tuple[str | None, ...]
    image: Take | Blank
    vectors: Mapping[str, Take]
    groups: int | None  # of group norm
    made: Index | None
    shape: Shape
    momentum: float
    unbiased: float
    eps: float
    collective: Collective

    def touches(self) -> Iterable[str]:
        image = (self.image.tensor,) if isinstance(self.image, Take) else ()
        return *filter(None, self.names), *image, *(take.tensor for take in self.vectors.values())

    def run(self, values: LocalValues) -> None:
        given = {name: take.of(values.parts) for name, take in self.vectors.items()}
        image, weight, bias = self.image.of(values.parts), given.get("weight"), given.get("bias")
        if self.groups is None:
            made, mean, variance, values.token = norm(image, weight, bias, values.token, self.collective.key)
        else:
            made, mean, variance = self._grouped(image, weight, bias, values)
        made = made if self.made is None else made[self.made]
        statistics = [mean, torch.rsqrt(variance + self.eps)]
        if "running_mean" in given:
            new = (given["running_mean"], mean), (given["running_var"], variance * self.unbiased)
            statistics += [old * (1 - self.momentum) + value * self.momentum for old, value in new]
        found = zip(self.names, (made.reshape(self.shape), *statistics), strict=False)
        values.parts.update((name, value) for name, value in found if name is not None)

    def _grouped(
        self, image: Tensor, weight: Tensor | None, bias: Tensor | None, values: LocalValues
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Group norm is batch norm with a channel per sample and group; weights come after."""
        assert self.groups is not None
        samples, channels, *space = image.shape
        grouped = image.reshape(1, samples * self.groups, channels // self.groups, *space)
        made, mean, variance, values.token = norm(grouped, None, None, values.token, self.collective.key)
        made = made.reshape(image.shape)
        by_channel = [1, channels, *(1 for _ in space)]
        made = made if weight is None else made * weight.view(by_channel)
        made = made if bias is None else made + bias.view(by_channel)
        return made, mean.view(samples, self.groups), variance.view(samples, self.groups)


Action: TypeAlias = (
    EnterBucket
    | GatherParameters
    | LayOut
    | Make
    | DrawOnWorker
    | SwapHalos
    | Sum
    | LocalProduct
    | Lookup
    | SoftmaxOverWorkers
    | Loss
    | Normalise
)
