"""Gathering: the statistics of one op, merged of parts of its input, and how their gradients reach a part.

Means and squared deviations are merged pairwise, each part weighted by its count, in float64: a mean of the
parts' means, or the statistics of a single part, would be something else.

Covariances: how the statistics of what a product makes are gathered of what it reads.

They are merged of parts like moments are, in float64, in which products of float32 are exact. Mean and
variances of the product follow from them and its weight, and so do the gradients, by the chain rule.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from stowplan.geometry import Rect
from stowplan.ir import Op, Shape
from stowplan.ops.regions import Partial
from stowplan.ops.statistics import GROUP_NORM
from stowplan.ops.table import shape_of
from stowplan.run.parts.part import Index
from stowplan.techniques.tiles.plan.products import Product
from stowplan.techniques.tiles.plan.segment import Segment


@dataclass(frozen=True, slots=True)
class OfProduct:
    """Mean and variances of a product's result, then the mean and covariances of its input."""

    product: Product
    count: int  # of places
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    dtype: torch.dtype

    @property
    def source(self) -> str:
        return self.product.source

    @property
    def read(self) -> tuple[str, ...]:
        """The tensors that the norm itself reads."""
        return self.names[:2]

    def seen_by(self, made: Rect) -> Index:
        """Where in what is read a part of the norm's output looks."""
        return (slice(made.lo[1], made.hi[1]),)

    def place(self, part: Rect) -> Index:
        """The places in a part of the source that the product reads."""
        steps = zip(part.lo[2:], self.product.strides, strict=True)
        return (slice(None), slice(None), *(slice(-low % step, None, step) for low, step in steps))

    def begun(self, device: torch.device) -> "Covariances":
        """Nothing gathered yet."""
        channels = self.shapes[2]
        count, mean, deviations = (
            torch.zeros(shape, dtype=torch.float64, device=device) for shape in ((), channels, channels * 2)
        )
        return Covariances(self, count, mean, deviations)

    def handed_back(self, given: Mapping[str, Tensor], incoming: Sequence[Tensor]) -> dict[str, Tensor]:
        """By name the gradients of what mean and variances are computed of, from theirs."""
        of_mean, of_variances, *_ = incoming
        mean, covariances = (given[name].to(of_mean.dtype) for name in self.names[2:])
        name, *biases = self.product.factors
        weight = given[name].flatten(1).to(of_mean.dtype)
        weighted = of_variances.unsqueeze(1) * weight
        of_weight = torch.outer(of_mean, mean) + 2 * (weighted @ covariances)
        return {
            self.names[2]: weight.T @ of_mean,
            self.names[3]: weight.T @ weighted,
            name: of_weight.view_as(given[name]),
            **dict.fromkeys(biases, of_mean),
        }

    def gradient(
        self, part: Tensor, place: Index, known: Sequence[Tensor], incoming: Sequence[Tensor]
    ) -> Tensor:
        """The gradient of a part of the source, from those of its mean and covariances."""
        slope = incoming[3] * (2 / self.count)
        offset = incoming[2] / self.count - slope @ known[2].to(slope.dtype)
        seen = part[place]
        slopes = slope.to(part.dtype).expand(len(seen), -1, -1)
        seed = torch.baddbmm(offset.to(part.dtype).unsqueeze(1), slopes, seen.flatten(2)).view_as(seen)
        if seen.shape == part.shape:
            return seed
        spread = torch.zeros_like(part)
        spread[place] = seed
        return spread


@dataclass(frozen=True, slots=True)
class Covariances:
    """Count, mean and sums of products of deviations of the parts so far."""

    gathering: OfProduct
    count: Tensor
    mean: Tensor
    deviations: Tensor

    def add(self, part: Tensor, place: Index) -> None:
        """Merge those of one more part."""
        rows = part[place].transpose(0, 1).flatten(1).to(torch.float64, copy=True)
        if not rows.shape[1]:
            return
        mean = rows.mean(1)
        rows -= mean.unsqueeze(1)
        share = rows.shape[1] / (self.count + rows.shape[1])
        away = mean - self.mean
        self.deviations.addmm_(rows, rows.T)
        self.deviations.add_(torch.outer(away, away) * (self.count * share))
        self.mean.add_(away * share)
        self.count.add_(rows.shape[1])

    def statistics(self, given: Mapping[str, Tensor]) -> list[Tensor]:
        """Mean and variances of the product, then mean and covariances of what it reads."""
        how = self.gathering
        name, *biases = how.product.factors
        weight, covariances = given[name].flatten(1).double(), self.deviations / how.count
        mean = weight @ self.mean
        for bias in biases:
            mean = mean + given[bias]
        variances = ((weight @ covariances) * weight).sum(1).clamp_min(0)
        return [t.to(how.dtype, copy=True) for t in (mean, variances, self.mean, covariances)]


aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class OfInput:
    """What is left of the tensor `source`, folded so that a group of channels is one dim, without `dims`.

    `names` are what the statistics are called among the values of a tile, `shapes` and `dtype` how they look:
    mean and variance, or the total.
    """

    source: str
    partial: Partial
    groups: int
    dims: tuple[int, ...]
    folded: Shape
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    dtype: torch.dtype

    @property
    def kept(self) -> Shape:
        return tuple(size for dim, size in enumerate(self.folded) if dim not in self.dims)

    @property
    def count(self) -> int:
        """The number of elements that one statistic summarises."""
        return prod(self.folded[dim] for dim in self.dims)

    @property
    def read(self) -> tuple[str, ...]:
        """The tensors that the op itself reads."""
        return self.names

    def seen_by(self, made: Rect) -> Index:
        """Where in what is read a part of the op's output looks."""
        return self.place(made)

    def place(self, part: Rect) -> Index:
        """Where in the statistics a part of the source contributes."""
        spans = [slice(low, high) for low, high in zip(part.lo, part.hi, strict=True)]
        if self.groups:
            spans.insert(1, slice(0, self.groups))
        return tuple(span for dim, span in enumerate(spans) if dim not in self.dims)

    def fold(self, part: Tensor) -> Tensor:
        """A part of the source with its groups apart."""
        return part.reshape(part.shape[0], self.groups, -1, *part.shape[2:]) if self.groups else part

    def begun(self, device: torch.device) -> "Totals | Moments":
        """Nothing gathered yet."""
        kind = Moments if self.partial is Partial.MOMENTS else Totals
        return kind(self, torch.zeros((3, *self.kept), dtype=torch.float64, device=device))

    def handed_back(self, _: Mapping[str, Tensor], __: Sequence[Tensor]) -> dict[str, Tensor]:
        """Nothing: the statistics were gathered as they are."""
        return {}

    def gradient(
        self, part: Tensor, place: Index, known: Sequence[Tensor], incoming: Sequence[Tensor]
    ) -> Tensor:
        """The gradient of a part of the source, from those of the statistics."""
        if self.partial is Partial.MOMENTS:
            mean, first, second = (self._spread(t, place) for t in (known[0], *incoming))
            seed = (self.fold(part) - mean).mul_(second * (2 / self.count)).add_(first / self.count)
            return seed.reshape(part.shape).to(part.dtype)
        share = incoming[0].reshape(self.kept) / (self.count if self.partial is Partial.MEAN else 1)
        return self._spread(share, place).to(part.dtype).expand(part.shape)

    def _spread(self, statistic: Tensor, place: Index) -> Tensor:
        """A statistic with a dim of size 1 for each dim that it runs over."""
        spread = statistic[place]
        for dim in self.dims:
            spread = spread.unsqueeze(dim)
        return spread


@dataclass(frozen=True, slots=True)
class Totals:
    """A sum or mean of which some parts are added."""

    gathering: OfInput
    sums: Tensor

    def add(self, part: Tensor, place: Index) -> None:
        """One more part."""
        dims = list(self.gathering.dims)
        self.sums[0][place] += part.sum(dims) if dims else part

    def statistics(self, _: Mapping[str, Tensor]) -> list[Tensor]:
        """The gathered statistics."""
        how = self.gathering
        total = self.sums[0] / (how.count if how.partial is Partial.MEAN else 1)
        return [total.reshape(how.shapes[0]).to(how.dtype)]


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sum of squared deviations of the parts so far."""

    gathering: OfInput
    sums: Tensor

    def add(self, part: Tensor, place: Index) -> None:
        """Merge the moments of one more part."""
        folded = self.gathering.fold(part.contiguous())
        rows = folded.reshape(1, -1, *folded.shape[2:]) if self.gathering.groups else folded
        mean, variance = (t.double() for t in aten.batch_norm_update_stats.default(rows, None, None, 0.0))
        so_far, count = self.sums[0][place], part.numel() / mean.numel()
        mean, variance = mean.reshape(so_far.shape), variance.reshape(so_far.shape)
        share = count / (so_far + count)
        away = mean - self.sums[1][place]
        self.sums[2][place] += variance * count + away.square() * so_far * share
        self.sums[1][place] += away * share
        self.sums[0][place] += count

    def statistics(self, _: Mapping[str, Tensor]) -> list[Tensor]:
        """Mean and variance, the latter of the elements themselves, not of what they are drawn from."""
        _, mean, squares = self.sums
        dtype = self.gathering.dtype
        alone = mean.to(dtype, copy=True)  # a view would keep the others
        return [alone, (squares / self.gathering.count).to(dtype)]


Gathering: TypeAlias = OfInput | OfProduct
"""How the statistics of an op are gathered."""


def gathering_of(segment: Segment, op: Op, product: Product | None) -> Gathering:
    """How the statistics of an op of the segment are gathered; the op may follow a product."""
    statistic = segment.statistic(op)
    assert statistic is not None, f"{op.id} takes no statistic"
    tensors = segment.graph.tensors
    source, output = tensors[op.inputs[0].tensor], tensors[op.outputs[0].tensor]
    shape = shape_of(source)
    groups = op.attributes["group"] if op.type == GROUP_NORM else 0
    assert isinstance(groups, int)
    folded, dims = shape, statistic.dims
    if groups:
        folded, dims = (shape[0], groups, shape[1] // groups, *shape[2:]), tuple(range(2, len(shape) + 1))
    kept = tuple(size for dim, size in enumerate(folded) if dim not in dims)
    names: tuple[str, ...] = tuple(f"{which} of {source.id} for {op.id}" for which in ("mean", "variance"))
    shapes: tuple[Shape, ...] = (kept, kept)
    dtype = torch.promote_types(getattr(torch, str(source.dtype)), torch.float32)
    if product is not None:
        before, channels = product.source, shape_of(tensors[product.source])[1:2]
        names += tuple(f"{which} of {before} for {op.id}" for which in ("mean", "covariances"))
        return OfProduct(product, prod(shape) // shape[1], names, (*shapes, channels, channels * 2), dtype)
    if statistic.is_output:
        names, shapes, dtype = (output.id,), (shape_of(output),), getattr(torch, str(output.dtype))
    return OfInput(source.id, statistic.partial, groups, dims, folded, names, shapes, dtype)
