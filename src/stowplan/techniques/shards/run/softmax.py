"""Softmax over workers: each has a part of every line, and all use the line's greatest value and sum.

Forward the greatest value, then the sum of exponentials; backward one sum, of what the gradient of every
element of a line depends on. Lines are taken a few at a time, so that no second tensor of scores is there.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stowplan.techniques.shards.run.workers import Workers

_PIECE = 2**18
"""Elements that are exponentiated at once."""


@dataclass(frozen=True, slots=True)
class Softmax:
    """Softmax, or its logarithm, along a dim of which each worker has a part."""

    workers: Workers
    axes: tuple[int, ...]
    dim: int
    is_log: bool
    dtype: torch.dtype  # of the result
    differentiated: bool

    def forward(self, scores: Tensor) -> Tensor:
        """This worker's part of the result."""
        kept = torch.promote_types(scores.dtype, torch.float32)
        shape = [1 if dim == self.dim else size for dim, size in enumerate(scores.shape)]
        own = scores.new_full(shape, -torch.inf, dtype=kept)
        if scores.numel():
            own = scores.amax(self.dim, keepdim=True).to(kept)
        greatest = self.workers.greatest(own, self.axes)
        total = torch.zeros_like(greatest)
        for rows in self._pieces(scores):
            shifted = scores[rows].to(kept) - greatest[rows]
            total[rows] = shifted.exp_().sum(self.dim, keepdim=True)
        total = self.workers.add_up(total, self.axes)
        level = greatest + total.log()
        made = scores.new_empty(scores.shape, dtype=self.dtype)  # in one piece, as in one process
        for rows in self._pieces(scores):
            shifted = scores[rows].to(kept) - level[rows]
            made[rows] = shifted if self.is_log else shifted.exp_()
        return made

    def backward(self, gradient: Tensor, made: Tensor) -> Tensor:
        """The gradient of this worker's part of the scores."""
        kept = torch.promote_types(made.dtype, torch.float32)
        shape = [1 if dim == self.dim else size for dim, size in enumerate(made.shape)]
        total = made.new_zeros(shape, dtype=kept)
        for rows in self._pieces(made):
            weighted = gradient[rows] if self.is_log else gradient[rows] * made[rows]
            total[rows] = weighted.sum(self.dim, keepdim=True, dtype=kept)
        total = self.workers.add_up(total, self.axes)
        found = made.new_empty(made.shape)
        for rows in self._pieces(made):
            given, value = gradient[rows].to(kept), made[rows].to(kept)
            found[rows] = given - value.exp() * total[rows] if self.is_log else (given - total[rows]) * value
        return found

    def _pieces(self, scores: Tensor) -> Iterator[slice]:
        """Lines that are taken together; all at once if they run along the first dim."""
        if not scores.numel():
            return
        count = len(scores)
        step = count if self.dim == 0 else max(1, _PIECE * count // scores.numel())
        yield from (slice(first, first + step) for first in range(0, count, step))
