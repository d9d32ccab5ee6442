"""Normalising a part by statistics that are known, differentiable in the statistics as well.

PyTorch's own kernels for evaluation do the work: the gradients that they give for weight and bias are the two
sums of which the gradients of variance and mean are made.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

aten = torch.ops.aten


def normalised(
    part: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Statistics are per channel [c], or per sample and group of channels [n, g].

    The kernels are several times as fast on what lies in one piece as on a part of something.
    """
    part = part.contiguous()
    if mean.dim() == 1:
        return _made(part, mean, variance, weight, bias, eps)
    samples, groups = mean.shape
    share = part.shape[1] // groups
    rows = part.reshape(1, -1, *part.shape[2:])
    mean, variance = (
        s.flatten().repeat_interleave(share) for s in (mean, variance)
    )  # kernels want them dense
    weight, bias = (None if vector is None else vector.repeat(samples) for vector in (weight, bias))
    return _made(rows, mean, variance, weight, bias, eps).reshape(part.shape)


def _made(
    rows: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    # The kernels read some vectors as if they lay in one piece, and past the end of one that is expanded.
    vectors = [None if v is None else v.contiguous() for v in (mean, variance, weight, bias)]
    made: Tensor = _Normalise.apply(rows, *vectors, eps)  # type: ignore[no-untyped-call]
    return made


class _Normalise(torch.autograd.Function):
    """(rows - mean) / sqrt(variance + eps) * weight + bias, all vectors along dim 1."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        ctx.save_for_backward(rows, mean, variance, weight)
        ctx.eps = eps
        made: Tensor = aten.native_batch_norm.default(rows, weight, bias, mean, variance, False, 0.0, eps)[0]
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        rows, mean, variance, weight = ctx.saved_tensors
        scale = torch.ones_like(mean) if weight is None else weight
        of_rows, of_scale, of_bias = aten.native_batch_norm_backward.default(
            incoming.contiguous(), rows, scale, mean, variance, None, None, False, ctx.eps, [True, True, True]
        )
        spread = torch.rsqrt(variance + ctx.eps)
        of_mean, of_variance = -scale * spread * of_bias, -0.5 * scale * spread.square() * of_scale
        given = ctx.needs_input_grad
        return (
            of_rows,
            of_mean if given[1] else None,
            of_variance if given[2] else None,
            of_scale if given[3] else None,
            of_bias if given[4] else None,
            None,
        )
