"""The measured memory of a step: the allocator's events on the CPU, its statistics on an accelerator.

The profiler tells of a free only if it saw the allocation, and then with the size it remembers for that
address, which may be an older block's. So frees are matched here by address, and storages that were there
before are asked to tell of their own end.
"""

import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, UntypedStorage, nn
from torch.profiler import ProfilerActivity, profile

from stowplan.alone import alone
from stowplan.capture.stand_ins import bytes_read
from stowplan.errors import BadUse
from stowplan.run.instances import instances_of
from stowplan.torch_private import (
    allocations_seen,
    allocations_within,
    gradient_of,
    is_profiled,
    storage_id,
)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Measurement(Generic[Result]):
    """Bytes on one device: before the step, and in all after each allocation and free during it.

    Seconds count from the first of these. On an accelerator the curve is before, peak and after.
    """

    result: Result
    before_bytes: int
    measured_curve_bytes: tuple[int, ...]
    measured_curve_seconds: tuple[float, ...]

    @property
    def measured_peak_bytes(self) -> int:
        """The most that was there at once, what was there before included."""
        return max(self.measured_curve_bytes, default=self.before_bytes)

    @property
    def measured_rise_bytes(self) -> int:
        """How far the peak is above the state before the step."""
        return self.measured_peak_bytes - self.before_bytes


def measure(
    step: Callable[[], Result], *, device: torch.device | str = "cpu", before: Iterable[Tensor] | None = None
) -> Measurement[Result]:
    """Run `step` once and follow the memory of `device`.

    `before` are the tensors that are there already: the bytes that they read, and their end, count. Without
    it, they are all that Python knows of. What `step` returns stays alive in the measurement.
    """
    chosen = torch.device(device)
    if chosen.type != "cpu":
        return _measure_accelerator(step, chosen, before)
    if is_profiled():
        raise BadUse(
            "a profiler is running, and PyTorch has only one in a process: measuring would end it. Measure"
            " outside of it"
        )
    return alone(partial(_measure_cpu, step, before))


def rise_while(
    run: Callable[[], Result], *, device: torch.device, before: Iterable[Tensor]
) -> tuple[Result, int]:
    """What `run` returns, and how many bytes memory rises meanwhile. It frees nothing that was there before.

    On the CPU this is of one thread, and leaves alone what runs beside it.
    """
    seen = allocations_within(run) if device.type == "cpu" else None
    if seen is None:
        measured = measure(run, device=device, before=before)
        return measured.result, measured.measured_rise_bytes
    result, changes = seen
    return result, max(accumulate(changes, initial=0))


def out_of_sight(work: Callable[[], Result]) -> Result:
    """Do the work in a thread of its own if a profiler follows this one, which then sees nothing of it."""
    if not is_profiled():
        return work()
    with ThreadPoolExecutor(1) as beside:  # waits for its thread, also if it is interrupted
        return beside.submit(copy_context().run, work).result()


def _measure_cpu(step: Callable[[], Result], before: Iterable[Tensor] | None) -> Measurement[Result]:
    standing = _Standing(_living_tensors() if before is None else before)
    del before  # it would keep tensors alive that the step frees
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes its start and stop on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = step()
    changes = sorted([*(_Change(*seen) for seen in allocations_seen(profiler)), *standing.ends])
    return Measurement(
        result, standing.nbytes, tuple(_curve(standing.blocks, changes)), tuple(_seconds(changes))
    )


def _measure_accelerator(
    step: Callable[[], Result], device: torch.device, standing: Iterable[Tensor] | None
) -> Measurement[Result]:
    """By the device's statistics, less what is there beside the `standing` tensors."""
    torch.accelerator.synchronize(device)
    torch.accelerator.reset_peak_memory_stats(device)
    there = device_bytes(device).current
    before = there if standing is None else _bytes_on(device, standing)
    del standing  # it would keep tensors alive that the step frees
    started = time.perf_counter()
    result = step()
    torch.accelerator.synchronize(device)
    took, after = time.perf_counter() - started, device_bytes(device)
    curve = (before, after.peak - there + before, after.current - there + before)
    return Measurement(result, before, curve, (0.0, took / 2, took))


def _bytes_on(device: torch.device, tensors: Iterable[Tensor]) -> int:
    there = (t for t in tensors if t.device.type == device.type and device.index in (None, t.device.index))
    return sum(bytes_read(there).values())


class DeviceBytes(NamedTuple):
    """What the allocator of an accelerator counts: now, and at most since peaks were reset."""

    current: int
    peak: int


def device_bytes(device: torch.device, what: str = "requested") -> DeviceBytes:
    """Bytes that are requested, allocated or reserved; where no requests are counted, allocated ones."""
    found = torch.accelerator.memory_stats(device)
    key = f"{what}_bytes.all" if f"{what}_bytes.all.current" in found else "allocated_bytes.all"
    return DeviceBytes(int(found.get(f"{key}.current", 0)), int(found.get(f"{key}.peak", 0)))


class _Change(NamedTuple):
    """Bytes came to an address, or went from it (below 0); 0 ends a storage that was there before."""

    nanoseconds: int
    address: int
    nbytes: int


class _Standing:
    """The storages that are there before a step, and when they end."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.blocks: dict[int, int] = {}
        self.ends: list[_Change] = []
        self._watched: list[weakref.ref[UntypedStorage]] = []
        standing = list(tensors)
        read = bytes_read(standing)
        for storage in (tensor.untyped_storage() for tensor in standing):
            self._enter(storage, read[storage_id(storage)])
        self.nbytes = sum(self.blocks.values())

    def _enter(self, storage: UntypedStorage, nbytes: int) -> None:
        address = storage.data_ptr()
        if nbytes and address not in self.blocks:
            self.blocks[address] = nbytes
            self._watched.append(weakref.ref(storage, lambda _: self._note_end(address)))

    def _note_end(self, address: int) -> None:
        self.ends.append(_Change(time.time_ns(), address, 0))


def _living_tensors() -> Iterator[Tensor]:
    for thing in instances_of([Tensor, nn.Parameter]):
        if thing.device.type == "cpu" and thing.layout is torch.strided:
            yield thing
            if thing.is_leaf and (gradient := gradient_of(thing)) is not None:  # not seen in Python yet
                yield gradient


def _seconds(changes: Sequence[_Change]) -> Iterator[float]:
    """When each change was, from the first on; the state before them has that time too."""
    yield 0.0
    for change in changes:
        yield (change.nanoseconds - changes[0].nanoseconds) / 1e9


def _curve(standing: dict[int, int], changes: Iterable[_Change]) -> Iterator[int]:
    """The bytes in all after each change. Frees are matched by address, for their sizes may be stale."""
    level, made = sum(standing.values()), dict[int, int]()
    yield level
    for change in changes:
        if change.nbytes > 0:
            made[change.address] = change.nbytes
            level += change.nbytes
        elif change.nbytes < 0 and change.address in made:
            level -= made.pop(change.address)
        else:
            level -= standing.pop(change.address, 0)
        yield level
