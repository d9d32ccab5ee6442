"""Products that are differentiated without having been computed: their gradients do not read their results.

What stands for the result has its shape and no contents; nothing may look at it but autograd.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

aten = torch.ops.aten


def deferred(target: object, given: Mapping[str, Any]) -> Tensor:
    """In place of a call of `target` with these arguments, by name."""
    if target is aten.convolution.default:
        settings = [given[name] for name in ("stride", "padding", "dilation", "transposed")]
        settings += [given["output_padding"], given["groups"]]
        return _applied(_Convolution, given["input"], given["weight"], given["bias"], settings)
    if target is aten.mm.default:
        return _applied(_Product, None, given["self"], given["mat2"], (1, 1))
    return _applied(_Product, given["self"], given["mat1"], given["mat2"], (given["beta"], given["alpha"]))


def _applied(function: type[torch.autograd.Function], *args: object) -> Tensor:
    made: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return made


def _without_contents(like: Tensor, shape: torch.Size) -> Tensor:
    return like.new_zeros(()).expand(shape)


class _Convolution(torch.autograd.Function):
    """aten.convolution of an image, a weight and perhaps a bias."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, weight: Tensor, bias: Tensor | None, settings: list[Any]) -> Tensor:
        ctx.save_for_backward(image, weight)
        ctx.bias, ctx.settings = None if bias is None else list(bias.shape), settings
        with torch.device("meta"):
            shaped = aten.convolution.default(image.to("meta"), weight.to("meta"), None, *settings)
        return _without_contents(image, shaped.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        image, weight = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        made = aten.convolution_backward.default(incoming, image, weight, ctx.bias, *ctx.settings, wanted)
        return (*made, None)


class _Product(torch.autograd.Function):
    """beta * added + alpha * left @ right."""

    @staticmethod
    def forward(
        ctx: Any, added: Tensor | None, left: Tensor, right: Tensor, factors: tuple[float, float]
    ) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.added, ctx.factors = None if added is None else added.shape, factors
        return _without_contents(left, torch.Size((left.shape[0], right.shape[1])))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        left, right = ctx.saved_tensors
        beta, alpha = ctx.factors
        wants_added, wants_left, wants_right, _ = ctx.needs_input_grad
        scaled = incoming if alpha == 1 else incoming * alpha
        return (
            (incoming * beta).sum_to_size(ctx.added) if wants_added else None,
            scaled @ right.t() if wants_left else None,
            left.t() @ scaled if wants_right else None,
            None,
        )
