"""Ops as simpler ones, where inductor's own way would keep a tensor whole inside the kernel."""

from collections.abc import Callable, Mapping, Sequence
from math import isqrt, prod

import torch
from torch import Tensor

from stowplan.torch_private import OpOverload

aten = torch.ops.aten
_SHORT, _LEAST_PARTS = 64, 8  # rows that are added one after another; parts that rows are divided into
_AS_IT_IS: Tensor = NotImplemented  # says to PyTorch that the op is not decomposed
_AS_THEY_ARE: tuple[Tensor, Tensor] = NotImplemented
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
    reduced, longest = _rows_of(values, dim)
    if longest is None:
        return _AS_IT_IS
    length = values.shape[longest]
    if length <= _SHORT:
        return values.sum(longest, keepdim=True, dtype=dtype).sum(reduced, keepdim)
    part = _part_of(length)
    whole = length - length % part
    shape = (*values.shape[:longest], whole // part, part, *values.shape[longest + 1 :])
    rows = values.narrow(longest, 0, whole).view(shape).sum(longest + 1, dtype=dtype)
    total = rows.sum(reduced, keepdim)
    if whole < length:
        total = total + values.narrow(longest, whole, length - whole).sum(reduced, keepdim, dtype=dtype)
    return total


def _rows_of(values: Tensor, dim: Sequence[int] | None) -> tuple[list[int], int | None]:
    """The dims that are reduced, and the longest that rows are counted by; None if rows are few.

    Rows lie further apart than the elements of each.
    """
    reduced = sorted({each % values.dim() for each in dim or range(values.dim())}) if values.dim() else []
    kept = (
        step for each, step in enumerate(values.stride()) if each not in reduced and values.shape[each] > 1
    )
    inner = min(kept, default=None)
    rows = [each for each in reduced if inner is not None and values.stride(each) > inner]
    if prod(values.shape[each] for each in rows) <= _SHORT:
        return reduced, None
    return reduced, max(rows, key=values.shape.__getitem__)


def _part_of(length: int) -> int:
    """How many rows are added first: as many as there are such parts, more or less."""
    parts = max((part for part in range(2, isqrt(length) + 1) if length % part == 0), default=1)
    return length // parts if parts >= _LEAST_PARTS else isqrt(length)


def mean_of_rows(
    values: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """A mean by the same sum."""
    total = sum_of_rows(values, dim, keepdim, dtype=dtype)
    return total if total is _AS_IT_IS else total * (total.numel() / values.numel())


def var_mean_of_rows(
    values: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    """Variance and mean over rows, from those of parts: the variances inside parts and that of their means.

    Inside a part, sums are of differences from its first row, so that little cancels.
    """
    reduced, longest = _rows_of(values, dim)
    if longest is None:
        return _AS_THEY_ARE
    count, length = prod(values.shape[each] for each in reduced), values.shape[longest]
    if length > _SHORT:
        part = max(part for part in range(1, _SHORT + 1) if length % part == 0)
        if part == 1:
            return _AS_THEY_ARE
        shape = (*values.shape[:longest], length // part, part, *values.shape[longest + 1 :])
        values = values.view(shape)
        reduced = [*(each + (each > longest) for each in reduced), longest + 1]
        length, longest = part, longest + 1
    first = values.narrow(longest, 0, 1)
    apart = values - first
    mean = apart.sum(longest, keepdim=True) / length
    inside = apart.square().sum(longest, keepdim=True) / length - mean.square()
    among, total = torch.var_mean(first + mean, reduced, correction=0, keepdim=keepdim)
    lost = 1 if correction is None else correction
    return (inside.mean(reduced, keepdim) + among) * (count / (count - lost)), total


DECOMPOSITIONS: Mapping[OpOverload, Callable[..., Tensor | tuple[Tensor, Tensor]]] = {
    aten.var_mean.correction: var_mean_of_rows,
    aten.sum.dim_IntList: sum_of_rows,
    aten.mean.dim: mean_of_rows,
    aten.nll_loss_backward.default: nll_loss_backward,
    aten.nll_loss2d_backward.default: nll_loss_backward,
}
