"""Collectives as PyTorch ops, so that a worker's step is captured and planned like any other step.

A token passes through all of them, forward and backward. It gives the messages of all workers one order, and
a worker whose results nobody uses still takes part in the backward collectives. Each op receives the key of
its collective; the step holds the collective.
"""

from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from stowplan.capture import Handle
from stowplan.capture.program import handle_of
from stowplan.techniques.shards.run.bucket import Bucket
from stowplan.techniques.shards.run.exchange import Exchange
from stowplan.techniques.shards.run.gather import Gather
from stowplan.techniques.shards.run.norm import Norm
from stowplan.techniques.shards.run.softmax import Softmax
from stowplan.techniques.shards.run.workers import Workers

OUTSIDE = -100
"""In place of an index that is in no place of a worker's part."""


@dataclass(frozen=True, slots=True)
class Total:
    """A sum over the workers along some axes; its gradient is summed over them as well."""

    workers: Workers
    axes: tuple[int, ...]
    differentiated: bool = True


Operation: TypeAlias = Exchange | Norm | Softmax | Total | Bucket | Gather
AnyOperation = TypeVar("AnyOperation", Exchange, Norm, Softmax, Total, Bucket, Gather)


class Collective(Handle):
    """An operation of all workers at one place of one step."""

    def __init__(self, name: str, operation: Operation) -> None:
        super().__init__(name, title=type(operation).__name__.lower())
        self.operation = operation

    def of_kind(self, kind: type[AnyOperation]) -> AnyOperation:
        """The operation, which must be of this kind."""
        assert isinstance(self.operation, kind), f"{self.name} is no {kind.__name__}"
        return self.operation


def collective_of(key: str) -> Collective:
    """The collective that an op was given by its key."""
    found = handle_of(key)
    assert isinstance(found, Collective), f"{key} is no collective"
    return found


@torch.library.custom_op("stowplan::first_token", mutates_args=())
def first_token(parameter: Tensor) -> Tensor:
    """The token before the first collective; it requires a gradient if the parameter does."""
    return parameter.new_zeros((), dtype=torch.float32)


@torch.library.custom_op("stowplan::bring", mutates_args=())
def bucket_placeholder(token: Tensor, name: str) -> Tensor:
    """The placeholder for the parameters of a bucket."""
    del name
    return token.clone()


@torch.library.custom_op("stowplan::exchange", mutates_args=())
def exchange(share: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The part that this worker holds, from its own share and the shares of others."""
    return collective_of(name).of_kind(Exchange).forward(share), token.clone()


@torch.library.custom_op("stowplan::exchange_back", mutates_args=())
def _exchange_back(gradient: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return collective_of(name).of_kind(Exchange).backward(gradient), token.clone()


@torch.library.custom_op("stowplan::begin_exchange_back", mutates_args=())
def _begin_exchange_back(gradient: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Begins the messages of `exchange_back`; the first result is all that is under way."""
    return collective_of(name).of_kind(Exchange).begin_backward(gradient), token.clone()


@torch.library.custom_op("stowplan::end_exchange_back", mutates_args=())
def _end_exchange_back(gradient: Tensor, flight: Tensor, name: str) -> Tensor:
    return collective_of(name).of_kind(Exchange).end_backward(gradient, flight)


@torch.library.custom_op("stowplan::total", mutates_args=())
def total(part: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """A part of a sum becomes the sum."""
    operation = collective_of(name).of_kind(Total)
    return operation.workers.add_up(part, operation.axes), token.clone()


@torch.library.custom_op("stowplan::norm", mutates_args=())
def norm(
    image: Tensor, weight: Tensor | None, bias: Tensor | None, token: Tensor, name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The normalised image, mean and variance."""
    return *collective_of(name).of_kind(Norm).forward(image, weight, bias), token.clone()


@torch.library.custom_op("stowplan::norm_back", mutates_args=())
def _norm_back(
    gradient: Tensor,
    image: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    token: Tensor,
    name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *collective_of(name).of_kind(Norm).backward(gradient, image, weight, mean, variance), token.clone()


@torch.library.custom_op("stowplan::softmax", mutates_args=())
def softmax(scores: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """This worker's part of a softmax, or of its logarithm, along a dim that workers divide."""
    return collective_of(name).of_kind(Softmax).forward(scores), token.clone()


@torch.library.custom_op("stowplan::softmax_back", mutates_args=())
def _softmax_back(gradient: Tensor, made: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return collective_of(name).of_kind(Softmax).backward(gradient, made), token.clone()


# The schema is written out: PyTorch 2.6 does not read `int | None` in a signature.
@torch.library.custom_op(
    "stowplan::own_places",
    mutates_args=(),
    schema="(Tensor places, int low, int high, int size, int? ignored) -> Tensor",
)
def own_places(places: Tensor, low: int, high: int, size: int, ignored: int | None) -> Tensor:
    """Places in a whole of this size as places in a worker's part of it; OUTSIDE for others and `ignored`."""
    is_wrong = (places < 0) | (places >= size)
    is_ignored = torch.zeros_like(is_wrong) if ignored is None else places == ignored
    if bool((is_wrong & ~is_ignored).any()):
        wrong = int(places[is_wrong & ~is_ignored][0])
        raise IndexError(f"{wrong} is no place among {size}: the step was given such a class or token")
    is_own = (places >= low) & (places < high) & ~is_ignored
    return torch.where(is_own, places.to(torch.int64) - low, OUTSIDE)


# Schemas with lists are written out: PyTorch 2.6 does not read `list[Tensor]` in a signature.
@torch.library.custom_op(
    "stowplan::begin_sums",
    mutates_args=(),
    schema="(Tensor[] gradients, Tensor token, str name) -> (Tensor, Tensor)",
)
def _begin_sums(gradients: list[Tensor], token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return collective_of(name).of_kind(Bucket).begin(gradients), token.clone()


@torch.library.custom_op(
    "stowplan::end_sums", mutates_args=(), schema="(Tensor flat, Tensor token, str name) -> Tensor[]"
)
def _end_sums(flat: Tensor, token: Tensor, name: str) -> list[Tensor]:
    del token  # all sums have been begun
    return collective_of(name).of_kind(Bucket).end(flat)


@torch.library.custom_op(
    "stowplan::begin_gather", mutates_args=(), schema="(Tensor[] shards, str name) -> Tensor"
)
def _begin_gather(shards: list[Tensor], name: str) -> Tensor:
    """Begins to gather whole parameters in a buffer. A plan may do so again for backward."""
    return collective_of(name).of_kind(Gather).begin(shards)


torch.library.define("stowplan::end_gather", "(Tensor(a) buffer, str name) -> Tensor(a)[]")


@torch.library.impl("stowplan::end_gather", "CompositeExplicitAutograd")
def _end_gather(buffer: Tensor, name: str) -> list[Tensor]:
    """The parameters in the buffer, once they are there. Nothing else reads it."""
    return collective_of(name).of_kind(Gather).end(buffer)


@torch.library.custom_op(
    "stowplan::scatter_sum", mutates_args=(), schema="(Tensor[] gradients, str name) -> Tensor[]"
)
def _scatter_sum(gradients: list[Tensor], name: str) -> list[Tensor]:
    """This worker's shards of gradients that are summed over all workers."""
    return collective_of(name).of_kind(Gather).backward(gradients)


@torch.library.custom_op(
    "stowplan::gather_in_order",
    mutates_args=(),
    schema="(Tensor[] shards, Tensor token, str name) -> Tensor[]",
)
def _gather_in_order(shards: list[Tensor], token: Tensor, name: str) -> list[Tensor]:
    """Parameters of which workers read parts, for workers with plans of their own; and the next token."""
    return [*collective_of(name).of_kind(Gather).forward(shards), token.clone()]


@torch.library.custom_op(
    "stowplan::begin_gather_in_order",
    mutates_args=(),
    schema="(Tensor[] shards, Tensor token, str name) -> (Tensor, Tensor)",
)
def _begin_gather_in_order(shards: list[Tensor], token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Begins to gather parameters that all workers read whole, in its turn among all messages."""
    return collective_of(name).of_kind(Gather).begin(shards), token.clone()


@torch.library.custom_op(
    "stowplan::scatter_sum_in_order",
    mutates_args=(),
    schema="(Tensor[] gradients, Tensor token, str name) -> Tensor[]",
)
def _scatter_sum_in_order(gradients: list[Tensor], token: Tensor, name: str) -> list[Tensor]:
    return [*collective_of(name).of_kind(Gather).backward(gradients), token.clone()]


@torch.library.custom_op("stowplan::quotient", mutates_args=())
def quotient(pair: Tensor) -> Tensor:
    """A sum over its weight, which has no gradient."""
    return pair[0] / pair[1]


@torch.library.custom_op("stowplan::fence", mutates_args=())
def after_collectives(value: Tensor, token: Tensor, counts: bool) -> Tensor:
    """A result for the caller, after all collectives that other workers wait for."""
    del token, counts
    return value.clone()


@first_token.register_fake
def _(parameter: Tensor) -> Tensor:
    return parameter.new_empty((), dtype=torch.float32)


@bucket_placeholder.register_fake
def _(token: Tensor, name: str) -> Tensor:
    del name
    return torch.empty_like(token)


@exchange.register_fake
def _(share: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return share.new_empty(collective_of(name).of_kind(Exchange).held.shape), torch.empty_like(token)


@_exchange_back.register_fake
def _(gradient: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return gradient.new_empty(collective_of(name).of_kind(Exchange).share.shape), torch.empty_like(token)


@_begin_exchange_back.register_fake
def _(gradient: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    size = collective_of(name).of_kind(Exchange).flight_size
    return gradient.new_empty(size), torch.empty_like(token)


@_end_exchange_back.register_fake
def _(gradient: Tensor, flight: Tensor, name: str) -> Tensor:
    del flight
    return gradient.new_empty(collective_of(name).of_kind(Exchange).share.shape)


@total.register_fake
def _(part: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    del name
    return part.new_empty(part.shape), torch.empty_like(token)


@norm.register_fake
def _(
    image: Tensor, weight: Tensor | None, bias: Tensor | None, token: Tensor, name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del weight, bias, name
    channels = image.shape[1]
    return (
        torch.empty_like(image),
        image.new_empty(channels),
        image.new_empty(channels),
        torch.empty_like(token),
    )


@softmax.register_fake
def _(scores: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    dtype = collective_of(name).of_kind(Softmax).dtype
    return scores.new_empty(scores.shape, dtype=dtype), torch.empty_like(token)


@_softmax_back.register_fake
def _(gradient: Tensor, made: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    del gradient, name
    return made.new_empty(made.shape), torch.empty_like(token)


@own_places.register_fake
def _(places: Tensor, low: int, high: int, size: int, ignored: int | None) -> Tensor:
    del low, high, size, ignored
    return torch.empty_like(places, dtype=torch.int64)


@_norm_back.register_fake
def _(
    gradient: Tensor,
    image: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    token: Tensor,
    name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del gradient, weight, variance, name
    return torch.empty_like(image), torch.empty_like(mean), torch.empty_like(mean), torch.empty_like(token)


@_begin_sums.register_fake
def _(gradients: list[Tensor], token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return gradients[0].new_empty(collective_of(name).of_kind(Bucket).size), torch.empty_like(token)


@_end_sums.register_fake
def _(flat: Tensor, token: Tensor, name: str) -> list[Tensor]:
    del token
    return [flat.new_empty(shape) for shape in collective_of(name).of_kind(Bucket).shapes]


@_begin_gather.register_fake
def _(shards: list[Tensor], name: str) -> Tensor:
    gather = collective_of(name).of_kind(Gather)
    return shards[0].new_empty(gather.buffer_elements(shards[0].itemsize))


@torch.library.register_fake("stowplan::end_gather")  # type: ignore[untyped-decorator]
def _(buffer: Tensor, name: str) -> list[Tensor]:
    return collective_of(name).of_kind(Gather).wholes(buffer)


@_scatter_sum.register_fake
def _(gradients: list[Tensor], name: str) -> list[Tensor]:
    pairs = zip(gradients, collective_of(name).of_kind(Gather).rows, strict=True)
    return [gradient.new_empty(rows.of_shard) for gradient, rows in pairs]


@_gather_in_order.register_fake
def _(shards: list[Tensor], token: Tensor, name: str) -> list[Tensor]:
    pairs = zip(shards, collective_of(name).of_kind(Gather).shapes, strict=True)
    return [*(shard.new_empty(shape) for shard, shape in pairs), torch.empty_like(token)]


@_begin_gather_in_order.register_fake
def _(shards: list[Tensor], token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    gather = collective_of(name).of_kind(Gather)
    return shards[0].new_empty(gather.buffer_elements(shards[0].itemsize)), torch.empty_like(token)


@_scatter_sum_in_order.register_fake
def _(gradients: list[Tensor], token: Tensor, name: str) -> list[Tensor]:
    pairs = zip(gradients, collective_of(name).of_kind(Gather).rows, strict=True)
    return [*(gradient.new_empty(rows.of_shard) for gradient, rows in pairs), torch.empty_like(token)]


@quotient.register_fake
def _(pair: Tensor) -> Tensor:
    return pair.new_empty(())


@after_collectives.register_fake
def _(value: Tensor, token: Tensor, counts: bool) -> Tensor:
    del token, counts
    return torch.empty_like(value)
