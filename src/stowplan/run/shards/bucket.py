"""A bucket of gradients: its sum over workers is begun as soon as they are there, and ended when wanted."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from stowplan.ir import Shape
from stowplan.run.shards.workers import Workers


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients of parameters of these shapes, which all workers along the axes have a part of."""

    workers: Workers
    axes: tuple[int, ...]
    shapes: tuple[Shape, ...]

    @property
    def size(self) -> int:
        """How many elements they have together."""
        return sum(map(prod, self.shapes))

    def begin(self, gradients: Sequence[Tensor]) -> Tensor:
        """This worker's parts in one flat tensor, which becomes the sum asynchronously."""
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self.workers.begin_sum(flat, self.axes)
        return flat

    def end(self, flat: Tensor) -> list[Tensor]:
        """The gradients, once they are summed."""
        self.workers.end_sum(flat, self.axes)
        parts = torch.split(flat, [prod(shape) for shape in self.shapes])
        return [part.view(shape).clone() for part, shape in zip(parts, self.shapes, strict=True)]
