"""This machine as a training step sees it: its devices, their memory, its disk, and their speed."""

import os
from dataclasses import dataclass

import torch

from stowplan.plan.pricing import Machine, Tier
from stowplan.run.cost.machine import free_bytes, measure_machine, platform_of
from stowplan.run.step.function import DISKS


@dataclass(frozen=True, slots=True)
class DeviceFinding:
    """A device that models can be trained on. `machine` was measured here, now or on an earlier day."""

    device: str
    name: str
    total_bytes: int
    free_bytes: int
    machine: Machine


def devices_here() -> tuple[DeviceFinding, ...]:
    """The CPU, and the accelerators that PyTorch sees."""
    found = [torch.device("cpu")]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        found += [torch.device(kind.type, number) for number in range(torch.accelerator.device_count())]
    return tuple(_finding(device) for device in found)


def disk_here() -> tuple[str, Tier]:
    """The folder of spill files and its disk as a tier, measured now or on an earlier day.

    Raises TierFailed or OSError where nothing can be written.
    """
    return DISKS.of("offload")()


def threads_here() -> int:
    """How many threads ops run on."""
    return torch.get_num_threads()


def _finding(device: torch.device) -> DeviceFinding:
    platform = platform_of(device)
    return DeviceFinding(
        str(device),
        platform.cpu if device.type == "cpu" else platform.device,
        _total_bytes(device),
        free_bytes(device),
        measure_machine(device),
    )


def _total_bytes(device: torch.device) -> int:
    if device.type != "cpu":
        _, total = torch.accelerator.get_memory_info(device)
        return int(total)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
