"""Timing a call. The least of several times is kept: whatever else a machine does only adds to it."""

import time
from collections.abc import Callable

import torch


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """How long one call takes, until the device has done it and its result is let go of."""
    started = time.perf_counter()
    run()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - started


def least_seconds(
    run: Callable[[], object], device: torch.device, *, repeats: int, limit_seconds: float = 1.0
) -> float:
    """The least of `repeats` calls, or of as many as begin within `limit_seconds`. The first warms up."""
    times = [seconds_of(run, device)]
    while len(times) <= repeats and sum(times) < limit_seconds:
        times.append(seconds_of(run, device))
    return min(times)
