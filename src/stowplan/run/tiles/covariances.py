"""Covariances: how the statistics of what a product makes are gathered of what it reads.

They are merged of parts like moments are, in float64, in which products of float32 are exact. Mean and
variances of the product follow from them and its weight, and so do the gradients, by the chain rule.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stowplan.geometry import Rect
from stowplan.ir import Shape
from stowplan.plan.tiles.products import Product
from stowplan.run.parts.part import Index


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
