"""Offload plugs in here: the tier of each kind of device, one for all steps of the process."""

from functools import cache

import torch

from stowplan.plan.pricing import Tier
from stowplan.run.step.function import DISKS, TIERS, LiveTier
from stowplan.techniques.offload.run.disk import DiskTier, user_folder
from stowplan.techniques.offload.run.host import HostTier


@TIERS.register("offload")
@cache
def tier_of(device: torch.device) -> LiveTier:
    """The host's memory for an accelerator, the user's disk for a CPU."""
    return DiskTier() if device.type == "cpu" else HostTier(device)


@DISKS.register("offload")
def disk_here() -> tuple[str, Tier]:
    """The folder of spill files and its disk as a tier, measured now or on an earlier day."""
    tier = DiskTier()
    try:
        return str(user_folder()), tier.described()
    finally:
        tier.close()
