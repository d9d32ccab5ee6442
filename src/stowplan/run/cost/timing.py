"""Timing a call: several times, the least of them, and not much longer than it is worth.

Other work on the machine can only make a call slower, so the least depends least on it.
"""

import time
from collections.abc import Callable

import torch


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """The seconds of one call, until the device is done and the result is freed."""
    clock = clock_of(device)
    started = clock()
    run()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return clock() - started


def clock_of(device: torch.device) -> Callable[[], float]:
    """Work on a single thread is timed by the thread's own clock, which stands still while others run."""
    is_alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if is_alone else time.perf_counter


def least_seconds(
    run: Callable[[], object], device: torch.device, *, repeats: int, limit_seconds: float = 1.0
) -> float:
    """The least of `repeats` calls after a first to warm up, as far as they begin within `limit_seconds`."""
    times = [seconds_of(run, device)]
    while len(times) <= repeats and sum(times) < limit_seconds:
        times.append(seconds_of(run, device))
    return min(times)
