"""Stand-ins: tensors with a shape, strides and a device but no data, in place of a model's own.

A parameter that a model holds under two names has one stand-in, so that tied weights stay tied.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from stowplan.errors import CaptureError


class StandIns:
    """Makes stand-ins, one per tensor, and remembers whose they are."""

    def __init__(self, device: torch.device) -> None:
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device
        self._made: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # holds the original too, so that its id stays its own

    def of(self, tensor: Tensor) -> Tensor:
        """The stand-in of `tensor`; one on the meta device stands on the device the step is meant for."""
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor, self._make(tensor)
        return self._made[id(tensor)][1]

    def _make(self, tensor: Tensor) -> Tensor:
        if type(tensor) not in (Tensor, nn.Parameter):
            raise CaptureError(f"{type(tensor).__name__} is not a plain tensor, and cannot be stood in for")
        with self.fakes:
            made = torch.empty_strided(
                tensor.shape,
                tensor.stride(),
                dtype=tensor.dtype,
                device=self._device if tensor.is_meta else tensor.device,
            )
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)

    @contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """Within, the parameters and buffers of `model` are stand-ins; afterwards they are its own again."""
        tables = [
            cast(dict[str, Tensor | None], table)
            for module in model.modules()
            for table in (module._parameters, module._buffers)
        ]
        originals = [dict(table) for table in tables]
        try:
            for table in tables:
                table.update({name: self.of(held) for name, held in table.items() if held is not None})
            yield
        finally:
            for table, original in zip(tables, originals, strict=True):
                table.clear()
                table.update(original)
