"""Changes: what a user's loop did to gradients between backward and `optimizer.step()`."""

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from stowplan.torch_private import version_of

_SAMPLE = 64  # elements of a gradient that shall not change, to see changes that no version counter tells


@dataclass(frozen=True, slots=True)
class Seen:
    """A gradient as it was when backward was done.

    Not every change raises its version: `grad.data.clamp_()` and a GradScaler do not.
    """

    gradient: Tensor
    version: int | None
    sample: Tensor

    @staticmethod
    def of(gradient: Tensor) -> "Seen":
        """The gradient as it is now."""
        return Seen(gradient, version_of(gradient), _sample(gradient))

    def is_still(self, gradient: Tensor | None) -> bool:
        """Whether this is the gradient, and unchanged."""
        same = gradient is self.gradient and version_of(self.gradient) == self.version
        return same and torch.equal(_sample(self.gradient), self.sample)


def _sample(gradient: Tensor) -> Tensor:
    """The bytes of some elements, so that NaN is equal to itself."""
    if gradient.layout is not torch.strided:
        return torch.empty(0)
    row = gradient.detach().flatten() if gradient.is_contiguous() else gradient.detach()[..., 0].flatten()
    return row[:: max(1, len(row) // _SAMPLE)].contiguous().view(torch.uint8).clone()


def is_called_by_scaler() -> bool:
    """Whether a GradScaler calls the optimizer's step: on gradients of zero it leaves no other trace."""
    frame = sys._getframe().f_back
    while frame is not None and frame.f_code is not torch.amp.GradScaler.step.__code__:
        frame = frame.f_back
    return frame is not None and bool(frame.f_locals["self"].is_enabled())
