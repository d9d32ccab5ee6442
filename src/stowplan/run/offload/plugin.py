"""Offload plugs in here: the tier of each kind of device, one for all steps of the process."""

from functools import cache

import torch

from stowplan.run.offload.disk import DiskTier
from stowplan.run.offload.host import HostTier
from stowplan.run.step.tier import TIERS, LiveTier


@TIERS.register("offload")
@cache
def tier_of(device: torch.device) -> LiveTier:
    """The host's memory for an accelerator, the user's disk for a CPU."""
    return DiskTier() if device.type == "cpu" else HostTier(device)
