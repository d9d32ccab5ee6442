"""What a running step asks of a tier: take this storage, give it back, and wait where the plan says so."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage

from stowplan.plan.tier import Tier


class Away(Protocol):
    """One storage that was given to a tier, under all the names it had."""

    def wait(self) -> None:
        """Return when the last transfer begun is done; raises TierFailed if it could not be."""

    def load(self) -> tuple[Tensor, ...]:
        """Begin to read it back; the tensors are there at once, their contents after `wait`."""


class LiveTier(Protocol):
    """A tier as generated code sees it."""

    def store(self, *tensors: Tensor) -> Away:
        """Begin to write the storage that all of `tensors` are in."""

    def reserve(self, sizes: Sequence[int]) -> None:
        """Make room for storages of these bytes before a step needs it; raises TierFull."""

    def described(self) -> Tier:
        """The tier as a planner sees it, with rates that were measured."""


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
