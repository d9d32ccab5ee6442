"""Ops as simpler ones, where inductor's own way would keep a tensor whole inside the kernel."""

from collections.abc import Callable, Mapping, Sequence
from math import isqrt

import torch
from torch import Tensor

from stowplan.torch_private import OpOverload

aten = torch.ops.aten
_SHORT, _LEAST_PARTS = 64, 8  # rows that are added one after another; parts that rows are divided into
_AS_IT_IS: Tensor = NotImplemented  # says to PyTorch that the op is not decomposed
_MEAN = 1  # the reduction of a loss, as PyTorch numbers it


def nll_loss_backward(
    gradient: Tensor,
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignored: int,
    total_weight: Tensor,
) -> Tensor:
    """The gradient by comparing each class with the target; inductor scatters it into a tensor of zeros."""
    channel = min(1, scores.dim() - 1)
    shape = [1] * scores.dim()
    shape[channel] = scores.shape[channel]
    target = target.unsqueeze(channel)
    classes = torch.arange(scores.shape[channel], device=scores.device).view(shape)
    if reduction == _MEAN:
        gradient = gradient / total_weight
    if 0 < gradient.dim() < scores.dim():
        gradient = gradient.unsqueeze(channel)
    if weight is not None:
        gradient = gradient * weight.view(shape)
    hit = torch.where(classes == target, -1.0, 0.0).to(scores.dtype)
    return hit * torch.where(target != ignored, gradient, 0.0)


def sum_of_rows(
    values: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """A sum over rows by sums over parts of them: inductor adds rows one after another, eager in pairs."""
    rank = values.dim()
    reduced = sorted({each % rank for each in dim or range(rank)}) if rank else []
    last = max(set(range(rank)).difference(reduced), default=-1)
    longest = max((each for each in reduced if each < last), key=values.shape.__getitem__, default=None)
    if longest is None or values.shape[longest] <= _SHORT:
        return _AS_IT_IS
    length = values.shape[longest]
    parts = max((part for part in range(2, isqrt(length) + 1) if length % part == 0), default=1)
    part = length // parts if parts >= _LEAST_PARTS else isqrt(length)
    whole = length - length % part
    shape = (*values.shape[:longest], whole // part, part, *values.shape[longest + 1 :])
    rows = values.narrow(longest, 0, whole).view(shape).sum(longest + 1, dtype=dtype)
    total = rows.sum(reduced, keepdim)
    if whole < length:
        total = total + values.narrow(longest, whole, length - whole).sum(reduced, keepdim, dtype=dtype)
    return total


def mean_of_rows(
    values: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """A mean by the same sum."""
    total = sum_of_rows(values, dim, keepdim, dtype=dtype)
    return total if total is _AS_IT_IS else total * (total.numel() / values.numel())


DECOMPOSITIONS: Mapping[OpOverload, Callable[..., Tensor]] = {
    aten.sum.dim_IntList: sum_of_rows,
    aten.mean.dim: mean_of_rows,
    aten.nll_loss_backward.default: nll_loss_backward,
    aten.nll_loss2d_backward.default: nll_loss_backward,
}
