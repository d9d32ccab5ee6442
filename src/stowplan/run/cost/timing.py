"""Timing a call: several times, the median of them, and not much longer than it is worth."""

import time
from collections.abc import Callable
from statistics import median

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


def median_seconds(
    run: Callable[[], object], device: torch.device, *, repeats: int, limit_seconds: float = 1.0
) -> float:
    """The median of `repeats` calls, or of as many as begin within `limit_seconds`, after a first to warm up.

    If that one took all the time, it is the answer.
    """
    first = seconds_of(run, device)
    times: list[float] = []
    while len(times) < repeats and first + sum(times) < limit_seconds:
        times.append(seconds_of(run, device))
    return median(times or [first])
