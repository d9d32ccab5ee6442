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
from stowplan.run.shards.bucket import Bucket
from stowplan.run.shards.exchange import Exchange
from stowplan.run.shards.gather import Gather
from stowplan.run.shards.norm import Norm
from stowplan.run.shards.workers import Workers


@dataclass(frozen=True, slots=True)
class Total:
    """A sum over the workers along some axes; its gradient is summed over them as well."""

    workers: Workers
    axes: tuple[int, ...]
    differentiated: bool = True


Operation: TypeAlias = Exchange | Norm | Total | Bucket | Gather
AnyOperation = TypeVar("AnyOperation", Exchange, Norm, Total, Bucket, Gather)


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
    "stowplan::gather_parameters", mutates_args=(), schema="(Tensor[] shards, str name) -> Tensor[]"
)
def _gather_parameters(shards: list[Tensor], name: str) -> list[Tensor]:
    """Whole parameters from the shards of all workers. A plan may gather them again for backward."""
    return collective_of(name).of_kind(Gather).forward(shards)


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
    """The same between workers that have plans of their own, and the next token."""
    return [*collective_of(name).of_kind(Gather).forward(shards), token.clone()]


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


@_gather_parameters.register_fake
def _(shards: list[Tensor], name: str) -> list[Tensor]:
    pairs = zip(shards, collective_of(name).of_kind(Gather).rows, strict=True)
    return [shard.new_empty(rows.shape) for shard, rows in pairs]


@_scatter_sum.register_fake
def _(gradients: list[Tensor], name: str) -> list[Tensor]:
    pairs = zip(gradients, collective_of(name).of_kind(Gather).rows, strict=True)
    return [gradient.new_empty(rows.of_shard) for gradient, rows in pairs]


@_gather_in_order.register_fake
def _(shards: list[Tensor], token: Tensor, name: str) -> list[Tensor]:
    pairs = zip(shards, collective_of(name).of_kind(Gather).rows, strict=True)
    return [*(shard.new_empty(rows.shape) for shard, rows in pairs), torch.empty_like(token)]


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
