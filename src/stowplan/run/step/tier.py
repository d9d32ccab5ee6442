"""The tier of a running step: where generated code stores tensors, and from where it loads them back."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from stowplan.plan.technique import Socket
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


TIERS: Socket[Callable[[torch.device], LiveTier]] = Socket("run", "offload")
"""Which tier a device's tensors go to."""

DISKS: Socket[Callable[[], tuple[str, Tier]]] = Socket("run", "offload")
"""The folder of spill files and its disk as a tier."""


def tier_for(device: torch.device) -> LiveTier:
    """The tier for a device, one for all steps of the process."""
    return TIERS.of("offload")(device)
