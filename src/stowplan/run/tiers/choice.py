"""Which tier a device's tensors are moved to if nothing else is said, one for all steps of the process."""

from functools import cache

import torch

from stowplan.run.tiers.disk import DiskTier
from stowplan.run.tiers.host import HostTier
from stowplan.run.tiers.live import LiveTier


@cache
def tier_for(device: torch.device) -> LiveTier:
    """The host's memory for an accelerator, the user's disk for a CPU."""
    return DiskTier() if device.type == "cpu" else HostTier(device)
