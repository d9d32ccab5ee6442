"""How tensors lie in the storages that a tier stores and loads."""

from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage


@dataclass(frozen=True, slots=True)
class Look:
    """How a tensor lies in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> "Look":
        """The look of a tensor."""
        return Look(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def on(self, storage: UntypedStorage) -> Tensor:
        """A tensor that lies so in `storage`."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


def bytes_of(storage: UntypedStorage) -> Tensor:
    """A storage as a row of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
