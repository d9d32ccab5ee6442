"""Planning a step on several devices, each with a budget of its own.

Plans are searched for the bytes of all devices together. If the share of a device exceeds its budget, the
step is planned for fewer bytes in all. The first plan that holds on every device is taken: the larger the
sum, the less is recomputed. A plan that would hold may be missed, and is then refused, never run.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from stowplan.errors import BadUse, BudgetTooSmall
from stowplan.run.beside import constants_by_device
from stowplan.run.planning.planner import DraftedStep
from stowplan.units import format_bytes, parse_bytes

_ATTEMPTS = 6  # sums of bytes that are planned for


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


def on_devices(
    budgets: DeviceBudgets, planned: Callable[[int], DraftedStep], *, is_given: bool = False
) -> DraftedStep:
    """The first step that `planned` makes whose share on each device is within its budget.

    BudgetTooSmall names the device that exceeds its budget by the least that was found. A plan that
    `is_given` is the only one there is.
    """
    room, least = budgets.sum_bytes, list[tuple[int, str, int]]()
    for attempt in range(_ATTEMPTS):
        try:
            found = planned(room)
        except BudgetTooSmall as refusal:
            if not least or refusal.minimum_bytes > budgets.sum_bytes:
                raise  # not even the sum is enough
            room, found = 0, planned(refusal.minimum_bytes)
        budgets.refuse_others(tensor.device for tensor in found.draft.graph.tensors.values())
        beside, peaks = constants_by_device(found.captured), found.draft.peaks_by_device
        taken = {name: peaks.get(name, 0) + beside.get(name, 0) for name in budgets.allowed_bytes}
        over = [(nbytes - budgets.allowed_bytes[name], name, nbytes) for name, nbytes in taken.items()]
        if max(over)[0] <= 0:
            return replace(found, draft=replace(found.draft, allowed_bytes=budgets.sum_bytes))
        least.append(max(over))
        room = min(room, found.draft.requested_peak_bytes) - 2**attempt * max(over)[0]
        if is_given or room <= 0:
            break
    excess, name, nbytes = min(least)
    raise BudgetTooSmall(
        f"{format_bytes(budgets.allowed_bytes[name])} allowed on {name}, but of the plans that were tried the"
        f" smallest takes {format_bytes(nbytes)} ({nbytes} bytes) there; move layers to another device, or"
        f" give {name} {format_bytes(excess)} more",
        allowed_bytes=budgets.sum_bytes,
        minimum_bytes=budgets.sum_bytes + excess,
        binding=(),
    )
