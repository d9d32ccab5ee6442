"""Repeat: a forward and its backward a second time, with the same draws, buffers and incoming gradients."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from stowplan.errors import TensorChanged
from stowplan.torch_private import version_of


class Repeat:
    """Made before a forward on the CPU. `given` are its tensors, `written` the buffers that it changes."""

    def __init__(
        self, run: Callable[[], Sequence[Tensor]], given: Iterable[Tensor], written: Iterable[Tensor]
    ) -> None:
        self._run, self._generator = run, torch.get_rng_state()
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in written]
        changed = {id(buffer) for buffer, _ in self._buffers}
        self._versions = [(tensor, version_of(tensor)) for tensor in given if id(tensor) not in changed]

    def backward(self, incoming: Sequence[Tensor | None]) -> None:
        """Run both halves; gradients leave as they did, and go where they go now."""
        for tensor, version in self._versions:
            if version_of(tensor) != version:
                raise TensorChanged(
                    f"a tensor of shape {tuple(tensor.shape)} has been modified by an inplace operation since"
                    " forward, which is to be run a second time: change it after optimizer.step()"
                )
        now = torch.get_rng_state()
        try:
            torch.set_rng_state(self._generator)
            with torch.no_grad():
                for buffer, kept in self._buffers:
                    buffer.copy_(kept)
            with torch.enable_grad():
                outputs = self._run()
        finally:
            torch.set_rng_state(now)
        pairs = [(o, g) for o, g in zip(outputs, incoming, strict=True) if g is not None]
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
