"""Ops as simpler ones, where inductor's own way would keep a tensor whole inside the kernel."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from stowplan.torch_private import OpOverload

aten = torch.ops.aten
_SHORT, _LEAST = 16, 4  # rows that are added one after another, at most and at least
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
    table = _Table.of(values, dim)
    if table is None:
        return _AS_IT_IS
    return table.shaped(_added(table.rows, dtype), keepdim=keepdim)


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
    """Variance and mean over rows, from those of parts."""
    table = _Table.of(values, dim)
    if table is None or table.others:
        return _AS_THEY_ARE
    variance, mean = _spread(table.rows)
    count = len(table.rows)
    variance = variance * (count / (count - (1 if correction is None else correction)))
    return table.shaped(variance, keepdim=keepdim), table.shaped(mean, keepdim=keepdim)


class _Table(NamedTuple):
    """Values with all rows that are reduced in the first dim; rows lie further apart than their elements."""

    rows: Tensor
    others: list[int]  # dims of what is left that are reduced as well
    kept: list[int]  # the sizes of the result if it keeps its dims
    sizes: list[int]  # and if not

    @classmethod
    def of(cls, values: Tensor, dim: Sequence[int] | None) -> "_Table | None":
        """None if rows are few."""
        dims, shape = range(values.dim()), values.shape
        reduced = sorted({each % values.dim() for each in dim or dims}) if values.dim() else []
        left = [each for each in dims if each not in reduced]
        inner = min((values.stride(each) for each in left if shape[each] > 1), default=None)
        rows = [each for each in reduced if inner is not None and values.stride(each) > inner]
        count = prod(shape[each] for each in rows)
        if count <= _SHORT:
            return None
        rows.sort(key=values.stride, reverse=True)
        rest = [each for each in dims if each not in rows]
        table = values.permute(*rows, *rest).reshape(count, *(shape[each] for each in rest))
        return cls(
            table,
            [place for place, each in enumerate(rest) if each in reduced],
            [1 if each in reduced else shape[each] for each in dims],
            [shape[each] for each in left],
        )

    def shaped(self, reduced: Tensor, *, keepdim: bool) -> Tensor:
        """The result from rows that are reduced."""
        total = reduced.sum(self.others) if self.others else reduced
        return total.view(self.kept if keepdim else self.sizes)


def _part_of(count: int) -> int:
    """How many rows are added first; it divides the number of rows if it can."""
    part = max(part for part in range(1, _SHORT + 1) if count % part == 0)
    return part if part >= _LEAST else _SHORT


def _added(rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    count = len(rows)
    if count <= _SHORT:
        return rows.sum(0, dtype=dtype)
    part = _part_of(count)
    whole = count - count % part
    parts = rows.narrow(0, 0, whole).view(whole // part, part, *rows.shape[1:])
    total = _added(parts.sum(1, dtype=dtype))
    return total if whole == count else total + rows.narrow(0, whole, count - whole).sum(0, dtype=dtype)


def _spread(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Variance and mean of rows: the variances inside parts, and that of their means.

    Inside a part, sums are of differences from its first row, so that little cancels.
    """
    count, length = len(rows), _part_of(len(rows))
    if count <= _SHORT or count % length:
        return torch.var_mean(rows, 0, correction=0)
    parts = rows.view(count // length, length, *rows.shape[1:])
    first = parts.narrow(1, 0, 1)
    apart = parts - first
    mean = apart.sum(1) / length
    inside = apart.square().sum(1) / length - mean.square()
    among, total = _spread(first.squeeze(1) + mean)
    return _added(inside) / len(inside) + among, total


DECOMPOSITIONS: Mapping[OpOverload, Callable[..., Tensor | tuple[Tensor, Tensor]]] = {
    aten.var_mean.correction: var_mean_of_rows,
    aten.sum.dim_IntList: sum_of_rows,
    aten.mean.dim: mean_of_rows,
    aten.nll_loss_backward.default: nll_loss_backward,
    aten.nll_loss2d_backward.default: nll_loss_backward,
}
