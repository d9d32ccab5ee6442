"""Norm over workers: statistics of all shares together, by the sums that each has of its own.

Forward two sums, of the values and of their squared distance from the mean; backward one, of the two sums
that the gradient of every value depends on. What a worker holds beyond its share is normalised, not counted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stowplan.run.parts.part import Index
from stowplan.techniques.shards.run.workers import Workers

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Norm:
    """Batch norm of [n, channels, ...]: `counted` is the worker's share in what it holds."""

    workers: Workers
    axes: tuple[int, ...]
    counted: Index | None  # None where the share is empty
    count: int  # values per channel, over all workers
    eps: float

    def statistics(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance per channel over all workers."""
        share = None if self.counted is None else image[self.counted]
        channels = image.shape[1]
        zeros = image.new_zeros(channels)
        dims = [dim for dim in range(image.dim()) if dim != 1]
        total = zeros if share is None else share.sum(dims)
        mean = self.workers.add_up(total, self.axes) / self.count
        shape = [1, channels, *(1 for _ in dims[1:])]
        sharding = zeros if share is None else (share - mean.view(shape)).square_().sum(dims)
        return mean, self.workers.add_up(sharding, self.axes) / self.count

    def forward(
        self, image: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The normalised image, mean and variance."""
        mean, variance = self.statistics(image)
        if not image.numel():
            return torch.empty_like(image), mean, variance
        made = aten.native_batch_norm.default(image, weight, bias, mean, variance, False, 0.0, self.eps)[0]
        return made, mean, variance

    def backward(
        self, gradient: Tensor, image: Tensor, weight: Tensor | None, mean: Tensor, variance: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of image, weight and bias; those of the parameters are this worker's part of the sum."""
        channels = image.shape[1]
        found, by_weight, by_bias = (
            torch.zeros_like(image),
            image.new_zeros(channels),
            image.new_zeros(channels),
        )
        scale = torch.rsqrt(variance + self.eps) * (1.0 if weight is None else weight)
        if image.numel():
            unit = torch.ones_like(mean) if weight is None else weight
            args = (gradient, image, unit, mean, variance, None, None, False, self.eps, [True, True, True])
            found, by_weight, by_bias = aten.native_batch_norm_backward.default(*args)
        sums = self.workers.add_up(torch.stack((by_bias, by_weight)), self.axes) / self.count
        if self.counted is not None:
            shape = [1, channels, *(1 for _ in image.shape[2:])]
            by_distance = (sums[1] * scale * torch.rsqrt(variance + self.eps)).view(shape)
            part = found[self.counted]
            part.sub_((sums[0] * scale).view(shape))
            part.addcmul_(image[self.counted] - mean.view(shape), by_distance, value=-1)
        return found, by_weight, by_bias
