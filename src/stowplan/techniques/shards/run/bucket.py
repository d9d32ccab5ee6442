"""A bucket of gradients: its sum over workers is begun as soon as they are there, and ended when wanted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from stowplan.ir import Shape
from stowplan.techniques.shards.run.workers import Workers


@dataclass(frozen=True, slots=True)
class Earlier:
    """Gradients of earlier backwards that this worker alone has: they wait in `.grad` for the last one."""

    parameters: tuple[Tensor, ...]
    is_last: Callable[[], bool]  # of the backward that is running

    def add_to(self, flat: Tensor) -> None:
        """Move them into the sum that is about to begin."""
        parts = torch.split(flat, [parameter.numel() for parameter in self.parameters])
        for part, parameter in zip(parts, self.parameters, strict=True):
            if parameter.grad is not None:
                part.add_(parameter.grad.reshape(-1))
                parameter.grad = None


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients of parameters of these shapes, which all workers along the axes have a part of.

    Those of several backwards are summed over the workers once, in the last of them.
    """

    workers: Workers
    axes: tuple[int, ...]
    shapes: tuple[Shape, ...]
    earlier: Earlier | None = None

    @property
    def size(self) -> int:
        """How many elements they have together."""
        return sum(map(prod, self.shapes))

    def begin(self, gradients: Sequence[Tensor]) -> Tensor:
        """This worker's parts in one flat tensor, which becomes the sum asynchronously."""
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        if not self._waits:
            if self.earlier is not None and not self.workers.is_rehearsal:
                self.earlier.add_to(flat)
            self.workers.begin_sum(flat, self.axes)
        return flat

    @property
    def _waits(self) -> bool:
        """Whether a later backward sums."""
        return self.earlier is not None and not self.workers.is_rehearsal and not self.earlier.is_last()

    def end(self, flat: Tensor) -> list[Tensor]:
        """The gradients, once they are summed."""
        if not self._waits:
            self.workers.end_sum(flat, self.axes)
        return self._parts(flat)

    def _parts(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, [prod(shape) for shape in self.shapes])
        return [part.view(shape).clone() for part, shape in zip(parts, self.shapes, strict=True)]

    def sum_earlier(self) -> None:
        """Sum what earlier backwards left over the workers now: no later one comes."""
        assert self.earlier is not None
        parameters = self.earlier.parameters
        flat = parameters[0].new_zeros(self.size)
        self.earlier.add_to(flat)
        self.workers.begin_sum(flat, self.axes)
        self.workers.end_sum(flat, self.axes)
        for parameter, gradient in zip(parameters, self._parts(flat), strict=True):
            parameter.grad = gradient
