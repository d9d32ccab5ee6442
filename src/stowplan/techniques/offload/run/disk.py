"""DiskTier: storages wait in a spill file, written and read by a thread each way, beside the ops.

The rates of a tier are measured once, by moving bytes through it, and kept beside what the probe found.

A storage is copied to the spill file and back in chunks, through a staging buffer each way: direct transfers
need aligned memory, which tensors are not. A checksum is taken on the way: what comes back
is what went out, or an error. Copies, checksums and transfers leave Python's lock to the ops meanwhile.
"""

import os
import weakref
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, UntypedStorage

from stowplan.errors import BadUse, TierDamaged
from stowplan.plan.pricing import Tier
from stowplan.run.cost import machine
from stowplan.run.cost.machine import USER_CACHE, ProbeCache, platform_of
from stowplan.techniques.offload.run.calls import SystemCalls
from stowplan.techniques.offload.run.live import Look, bytes_of
from stowplan.techniques.offload.run.spill import BLOCK, Extent, SpillFile, whole_blocks
from stowplan.units import format_bytes

_MOVED_BYTES = 2**25
_REPEATS = 5


def rates_of(tier: "DiskTier", cache: ProbeCache | None = USER_CACHE) -> Tier:
    """The disk tier as planners see it."""
    spill, place = tier.spill, platform_of(torch.device("cpu"))
    key = f"{os.fstat(spill.file).st_dev} {'direct' if spill.is_direct else 'cached'} {tier.chunk_bytes}"
    rates = cache.read(place).tiers.get(key) if cache else None
    if rates is None:
        rates = _measured(tier)
        if cache:
            cache.add(place, {}, tiers={key: rates})
    return Tier("disk", tier.capacity_bytes, *rates, staging_bytes=tier.staging_bytes)


def _measured(tier: "DiskTier") -> tuple[float, float, float]:
    """Bytes per second out and back, and the seconds that the smallest transfer takes."""
    large, small = (torch.zeros(nbytes, dtype=torch.uint8) for nbytes in (_MOVED_BYTES, 1))
    out, back = _both_ways(tier, large)
    latency = sum(_both_ways(tier, small)) / 2
    return _MOVED_BYTES / max(out - latency, 1e-9), _MOVED_BYTES / max(back - latency, 1e-9), latency


def _both_ways(tier: "DiskTier", data: torch.Tensor) -> tuple[float, float]:
    """The least seconds to store and to load: other work on the machine can only make a transfer slower.

    The first round, which makes room, does not count.
    """
    rounds = [_one_round(tier, data) for _ in range(_REPEATS + 1)][1:]
    return min(out for out, _ in rounds), min(back for _, back in rounds)


def _one_round(tier: "DiskTier", data: torch.Tensor) -> tuple[float, float]:
    started = perf_counter()
    away = tier.store(data)
    away.wait()
    stored = perf_counter()
    loaded = away.load()
    away.wait()
    del loaded
    return stored - started, perf_counter() - stored


Bytes: TypeAlias = NDArray[np.uint8]


class Staging:
    """A buffer each way. They are PyTorch's memory, so that its allocator's figures count them."""

    def __init__(self, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.out, self.back = _aligned(chunk_bytes), _aligned(chunk_bytes)


def _aligned(nbytes: int) -> Bytes:
    memory: Bytes = torch.empty(nbytes + BLOCK, dtype=torch.uint8).numpy()
    start = -memory.ctypes.data % BLOCK
    return memory[start : start + nbytes]


def write_out(spill: SpillFile, staging: Staging, extent: Extent, given: list[Bytes]) -> int:
    """Write the bytes in `given`, which is emptied; returns their checksum."""
    source, checksum = given.pop(), 0
    for start in range(0, extent.nbytes, staging.chunk_bytes):
        part = source[start : start + staging.chunk_bytes]
        staged = staging.out[: len(part)]
        np.copyto(staged, part)
        checksum = zlib.crc32(staged.data, checksum)
        spill.write(staging.out[: whole_blocks(len(part))].data, extent.offset + start)
    spill.flush()
    return checksum


def read_back(
    spill: SpillFile, staging: Staging, extent: Extent, given: list[Bytes], written: "Future[int]"
) -> None:
    """Fill the bytes in `given`, which is emptied, once all is written; holds them to their checksum."""
    target, expected, checksum = given.pop(), written.result(), 0
    for start in range(0, extent.nbytes, staging.chunk_bytes):
        part = target[start : start + staging.chunk_bytes]
        staged = staging.back[: len(part)]
        spill.read(staging.back[: whole_blocks(len(part))].data, extent.offset + start)
        checksum = zlib.crc32(staged.data, checksum)
        np.copyto(part, staged)
    if checksum != expected:
        raise TierDamaged(
            f"{spill.folder}: {format_bytes(extent.nbytes)} came back with another checksum than they had;"
            " the step is abandoned, have this disk looked after"
        )


CHUNK_BYTES = 2**20  # moved at once: longer chunks are hardly faster, and staging counts against the budget


class DiskTier:
    """One spill file and two threads, however many steps use it, until it is closed."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        direct: bool = True,
        chunk_bytes: int = CHUNK_BYTES,
        calls: SystemCalls | None = None,
    ) -> None:
        self.chunk_bytes = whole_blocks(chunk_bytes)
        self.spill = SpillFile(folder or user_folder(), direct=direct, calls=calls or SystemCalls())
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="stowplan-store")
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="stowplan-load")
        self._staging: weakref.ref[Staging] | None = None

    def described(self) -> Tier:
        """The tier with the rates of this disk, measured once and remembered."""
        return rates_of(self)

    @property
    def staging_bytes(self) -> int:
        """The device memory that the engines take in a step that uses the tier."""
        return 2 * (self.chunk_bytes + BLOCK)

    @property
    def capacity_bytes(self) -> int:
        """The bytes of the file, and those that the disk has left for it."""
        disk = os.fstatvfs(self.spill.file)  # the folder may be gone by now, the file stays
        return self.spill.nbytes + disk.f_bavail * disk.f_frsize

    def reserve(self, sizes: Sequence[int]) -> None:
        """Set room aside for storages of these sizes."""
        held = [self.spill.take(nbytes) for nbytes in sizes]
        del held

    def store(self, *tensors: Tensor) -> "DiskAway":
        """Begin to write the storage of `tensors`."""
        storage = tensors[0].untyped_storage()
        extent = self.spill.take(storage.nbytes())
        return DiskAway(self, self._staged(), extent, storage, tuple(map(Look.of, tensors)))

    def close(self) -> None:
        """Finish what is under way and give the file back to the disk."""
        self.writer.shutdown()
        self.reader.shutdown()
        self.spill.close()

    def _staged(self) -> "Staging":
        """One pair of buffers for all that is away at a time."""
        staging = self._staging() if self._staging else None
        if staging is None:
            staging = Staging(self.chunk_bytes)
            self._staging = weakref.ref(staging)
        return staging


class DiskAway:
    """One storage in the spill file, or on its way there or back."""

    def __init__(
        self,
        tier: DiskTier,
        staging: Staging,
        extent: Extent,
        storage: UntypedStorage,
        looks: tuple[Look, ...],
    ) -> None:
        self._tier, self._staging, self._extent, self._looks = tier, staging, extent, looks
        # In a list, which the thread empties: the memory is free as soon as the transfer is done.
        given = [bytes_of(storage).numpy()]
        self._written: Future[int] = tier.writer.submit(write_out, tier.spill, staging, extent, given)
        self._under_way: Future[int] | Future[None] = self._written

    def wait(self) -> None:
        """Until what was begun last is done."""
        self._under_way.result()

    def load(self) -> tuple[Tensor, ...]:
        """Begin to read it into memory of its own."""
        storage = torch.empty(self._extent.nbytes, dtype=torch.uint8).untyped_storage()
        given = [bytes_of(storage).numpy()]
        self._under_way = self._tier.reader.submit(
            read_back, self._tier.spill, self._staging, self._extent, given, self._written
        )
        return tuple(look.on(storage) for look in self._looks)


def user_folder() -> Path:
    """Where spill files are made: where STOWPLAN_SPILL says, or in the user's cache folder.

    Not in /tmp, which on many machines is memory itself.
    """
    if told := os.environ.get("STOWPLAN_SPILL"):
        return Path(told)
    try:
        return machine.user_folder("spill")
    except OSError as fault:
        raise BadUse("this user has no home folder: set STOWPLAN_SPILL to a folder on disk") from fault
