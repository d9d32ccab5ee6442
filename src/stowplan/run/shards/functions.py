"""What workers say to each other as differentiable functions: how each op's gradient is another talk."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from stowplan.run.shards.operator import bucket_named, exchange_named, total_named


class Exchanged(torch.autograd.Function):
    """A share and a token become what is held and the next token."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
        ctx.name, ctx.looks = name, exchange_named(name).held.shape
        ctx.options = {"dtype": share.dtype, "device": share.device}
        ctx.set_materialize_grads(False)
        held, token = torch.ops.stowplan.exchange(share, token, name)
        if not exchange_named(name).differentiated:
            ctx.mark_non_differentiable(held)
        return held, token

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, token: Tensor) -> tuple[Tensor | None, Tensor, None]:
        if not exchange_named(ctx.name).differentiated:
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
        if not total_named(name).differentiated:
            ctx.mark_non_differentiable(total)
        return total, token

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, token: Tensor) -> tuple[Tensor | None, Tensor, None]:
        if not total_named(ctx.name).differentiated:
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


class Trained(torch.autograd.Function):
    """Parameters in buckets become the first token and a stand-in per bucket; backward ends the sums."""

    @staticmethod
    def forward(ctx: Any, names: Sequence[str], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.names = names
        ctx.set_materialize_grads(False)
        firsts = accumulate((len(bucket_named(name).shapes) for name in names[:-1]), initial=0)
        pairs = zip(names, firsts, strict=True)
        stands = (parameters[at].new_empty(()).expand(bucket_named(name).size) for name, at in pairs)
        return parameters[0].new_zeros((), dtype=torch.float32), *stands

    @staticmethod
    def backward(ctx: Any, token: Tensor, *flats: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor] = []
        for name, flat in reversed(list(zip(ctx.names, flats, strict=True))):  # as they were begun
            found = [*torch.ops.stowplan.end_sums(flat, token, name), *found]
        return None, *found


class Bucketed(torch.autograd.Function):
    """A bucket's stand-in becomes its parameters, which all workers have; backward begins to sum."""

    @staticmethod
    def forward(ctx: Any, stand: Tensor, token: Tensor, name: str, *parameters: Tensor) -> tuple[Tensor, ...]:
        del stand
        ctx.name = name
        return token.view_as(token), *(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, token: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flat, token = torch.ops.stowplan.begin_sums(gradients, token, ctx.name)
        return flat, token, None, *(None for _ in gradients)


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
