"""Budgets by device plug in here: plans are searched for the bytes of all devices together."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stowplan.errors import BadUse, BudgetTooSmall
from stowplan.run.beside import constants_by_device
from stowplan.run.planning.constraint import BUDGETS_BY_DEVICE
from stowplan.run.planning.planner import DraftedStep
from stowplan.units import format_bytes, parse_bytes


@dataclass(frozen=True, slots=True)
class DeviceBudgets:
    """Bytes by device, as graphs spell devices. The host has no limit unless it is named."""

    allowed_bytes: Mapping[str, int]

    @staticmethod
    def of(budget: Mapping[Any, float | str]) -> "DeviceBudgets":
        """From what a user wrote: devices or their names, and bytes or texts."""
        found: dict[str, int] = {}
        for written, amount in budget.items():
            device = _device_named(written)
            if str(device) in found:
                raise BadUse(f"two budgets for {str(device)!r}; give each device one")
            found[str(device)] = parse_bytes(amount, f"budget[{str(device)!r}]")
        if not found:
            raise BadUse(
                "the budget names no device; write {'cuda:0': '8GiB', 'cuda:1': '8GiB'}, or one number"
            )
        return DeviceBudgets(found)

    @property
    def sum_bytes(self) -> int:
        return sum(self.allowed_bytes.values())

    def refuse_others(self, devices: Iterable[str]) -> None:
        """BadUse if the step has tensors on an accelerator that has no budget, or on none that has one."""
        devices = set(devices)
        if devices.isdisjoint(self.allowed_bytes):
            raise BadUse(
                f"the budget is for {', '.join(self.allowed_bytes)}, and the step has no tensor there: its"
                " tensors"
                f" are on {', '.join(sorted(devices))}"
            )
        if unnamed := sorted(devices - set(self.allowed_bytes) - {"cpu", "meta", ""}):
            raise BadUse(
                f"the step has tensors on {unnamed[0]}, and the budget is for"
                f" {', '.join(self.allowed_bytes)}: name all of its devices"
            )


def _device_named(written: object) -> torch.device:
    """A device by its name; the only one of its type needs no number."""
    if not isinstance(written, str | torch.device):
        raise BadUse(f"a budget for {written!r}: write a device, as in {{'cuda:0': '8GiB'}}")
    try:
        device = torch.device(written)
    except RuntimeError:
        raise BadUse(
            f"a budget for {written!r}, which is no device of PyTorch: write one as in {{'cuda:0': '8GiB'}}"
        ) from None
    if device.type == "cpu" or device.index is not None:
        return device
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if there is not None and there.type == device.type and torch.accelerator.device_count() == 1:
        return torch.device(device.type, 0)
    raise BadUse(f"a budget for {str(device)!r}, which is not one device here: write '{device}:0'")


class WithinDevices:
    """The share of each device keeps to the budget of that device."""

    def __init__(self, budgets: DeviceBudgets) -> None:
        self._budgets = budgets

    def applied_to(self, step: DraftedStep) -> DraftedStep:
        """The step; BadUse if it is on other devices."""
        self._budgets.refuse_others(tensor.device for tensor in step.draft.graph.tensors.values())
        return step

    def excess_bytes(self, step: DraftedStep, allowed_bytes: int) -> int:  # noqa: ARG002 -- the sum of all
        """Of the device that exceeds its budget by most."""
        return self._worst(step)[0]

    def refusal(
        self, step: DraftedStep, allowed_bytes: int, refused: BudgetTooSmall | None
    ) -> BudgetTooSmall:
        """Names the device that exceeds its budget, or the sum, if not even that is enough."""
        if refused is not None and refused.minimum_bytes > allowed_bytes:
            return refused
        excess, name, nbytes = self._worst(step)
        return BudgetTooSmall(
            f"{format_bytes(self._budgets.allowed_bytes[name])} allowed on {name}, but of the plans that were"
            f" tried the smallest takes {format_bytes(nbytes)} ({nbytes} bytes) there; move layers to another"
            f" device, or give {name} {format_bytes(excess)} more",
            allowed_bytes=allowed_bytes,
            minimum_bytes=allowed_bytes + excess,
            binding=(),
        )

    def _worst(self, step: DraftedStep) -> tuple[int, str, int]:
        """The largest excess, its device, and what the step takes there."""
        beside, peaks = constants_by_device(step.captured), step.draft.peaks_by_device
        budgets = self._budgets.allowed_bytes
        taken = {name: peaks.get(name, 0) + beside.get(name, 0) for name in budgets}
        return max((nbytes - budgets[name], name, nbytes) for name, nbytes in taken.items())


@BUDGETS_BY_DEVICE.register("devices")
def within_devices(budget: Mapping[Any, float | str]) -> tuple[int, WithinDevices]:
    """The sum of the budgets, and what they ask of a step."""
    budgets = DeviceBudgets.of(budget)
    return budgets.sum_bytes, WithinDevices(budgets)
