"""What workers say to each other as ops of PyTorch, so that a worker's step is captured and planned like any.

A token goes through all of them, forward and backward: it puts every worker's messages in the same order, and
makes sure that a worker whose results nobody uses still takes part in what comes back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from stowplan.run.shards.exchange import Exchange
from stowplan.run.shards.norm import Norm
from stowplan.run.shards.workers import Workers


@dataclass(frozen=True, slots=True)
class Total:
    """A sum over the workers along some axes; its gradient is summed over them as well."""

    workers: Workers
    axes: tuple[int, ...]
    differentiated: bool = True


Talk: TypeAlias = Exchange | Norm | Total
_TALKS: dict[str, Talk] = {}


def enter(name: str, talk: Talk) -> str:
    """Make something that workers do together known by a name, which ops carry."""
    _TALKS[name] = talk
    return name


def _exchange_named(name: str) -> Exchange:
    talk = _TALKS[name]
    assert isinstance(talk, Exchange)
    return talk


def _norm_named(name: str) -> Norm:
    talk = _TALKS[name]
    assert isinstance(talk, Norm)
    return talk


def _total_named(name: str) -> Total:
    talk = _TALKS[name]
    assert isinstance(talk, Total)
    return talk


@torch.library.custom_op("stowplan::exchange", mutates_args=())
def _exchange(share: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return _exchange_named(name).forward(share), token.clone()


@torch.library.custom_op("stowplan::exchange_back", mutates_args=())
def _exchange_back(gradient: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return _exchange_named(name).backward(gradient), token.clone()


@torch.library.custom_op("stowplan::total", mutates_args=())
def _total(part: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    total = _total_named(name)
    return total.workers.add_up(part, total.axes), token.clone()


@torch.library.custom_op("stowplan::norm", mutates_args=())
def _norm(
    image: Tensor, weight: Tensor | None, bias: Tensor | None, token: Tensor, name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_norm_named(name).forward(image, weight, bias), token.clone()


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
    return *_norm_named(name).backward(gradient, image, weight, mean, variance), token.clone()


@torch.library.custom_op("stowplan::fence", mutates_args=())
def _fence(value: Tensor, token: Tensor) -> Tensor:
    del token  # it only has to be there first
    return value.clone()


@_exchange.register_fake
def _(share: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return share.new_empty(_exchange_named(name).held.shape), torch.empty_like(token)


@_exchange_back.register_fake
def _(gradient: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return gradient.new_empty(_exchange_named(name).share.shape), torch.empty_like(token)


@_total.register_fake
def _(part: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    del name
    return part.new_empty(part.shape), torch.empty_like(token)


@_norm.register_fake
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


@_fence.register_fake
def _(value: Tensor, token: Tensor) -> Tensor:
    del token
    return torch.empty_like(value)


class Exchanged(torch.autograd.Function):
    """A share and a token become what is held and the next token."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
        ctx.name, ctx.looks = name, _exchange_named(name).held.shape
        ctx.options = {"dtype": share.dtype, "device": share.device}
        ctx.set_materialize_grads(False)
        held, token = torch.ops.stowplan.exchange(share, token, name)
        if not _exchange_named(name).differentiated:
            ctx.mark_non_differentiable(held)
        return held, token

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, token: Tensor) -> tuple[Tensor | None, Tensor, None]:
        if not _exchange_named(ctx.name).differentiated:
            return None, token, None
        if gradient is None:
            gradient = torch.zeros(ctx.looks, **ctx.options)
        found, token = torch.ops.stowplan.exchange_back(gradient, token, ctx.name)
        return found, token, None


class Totalled(torch.autograd.Function):
    """A part of a sum and a token become the sum and the next token."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
        ctx.name = name
        total, token = torch.ops.stowplan.total(part, token, name)
        if not _total_named(name).differentiated:
            ctx.mark_non_differentiable(total)
        return total, token

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, token: Tensor) -> tuple[Tensor | None, Tensor, None]:
        if not _total_named(ctx.name).differentiated:
            return None, token, None
        found, token = torch.ops.stowplan.total(gradient, token, ctx.name)
        return found, token, None


class Normalised(torch.autograd.Function):
    """An image, weight, bias and token become the normalised image, statistics and the next token."""

    @staticmethod
    def forward(
        ctx: Any, image: Tensor, weight: Tensor | None, bias: Tensor | None, token: Tensor, name: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        made, mean, variance, token = torch.ops.stowplan.norm(image, weight, bias, token, name)
        ctx.name, ctx.has_bias = name, bias is not None
        ctx.save_for_backward(image, weight, mean, variance)
        ctx.mark_non_differentiable(mean, variance)
        return made, mean, variance, token

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor, _: Tensor, __: Tensor, token: Tensor
    ) -> tuple[Tensor | None, ...]:
        image, weight, mean, variance = ctx.saved_tensors
        found, by_weight, by_bias, token = torch.ops.stowplan.norm_back(
            gradient, image, weight, mean, variance, token, ctx.name
        )
        return found, None if weight is None else by_weight, by_bias if ctx.has_bias else None, token, None


class Shared(torch.autograd.Function):
    """Parameters that all workers have. What each adds to their gradients is summed, once, at the end."""

    @staticmethod
    def forward(ctx: Any, name: str, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return parameters[0].new_zeros((), dtype=torch.float32), *(p.view_as(p) for p in parameters)

    @staticmethod
    def backward(ctx: Any, token: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = []
        for gradient in gradients:
            total, token = torch.ops.stowplan.total(gradient, token, ctx.name)
            found.append(total)
        return None, *found


class Results(torch.autograd.Function):
    """What the caller gets. Of results that several workers have, the gradient of one alone counts."""

    @staticmethod
    def forward(ctx: Any, counts: Sequence[bool], token: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.counts, ctx.device = counts, token.device
        made = tuple(torch.ops.stowplan.fence(value, token) for value in values)
        ctx.mark_non_differentiable(*(value for value in made if not value.is_floating_point()))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.counts, gradients, strict=True)
        found = [gradient if counts else torch.zeros_like(gradient) for counts, gradient in pairs]
        return None, torch.zeros((), dtype=torch.float32, device=ctx.device), *found
