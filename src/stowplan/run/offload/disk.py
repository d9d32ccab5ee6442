"""DiskTier: storages wait in a spill file, written and read by a thread each way, beside the ops."""

import os
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, UntypedStorage

from stowplan.errors import BadUse
from stowplan.plan.pricing import Tier
from stowplan.run.cost import probe_cache
from stowplan.run.offload.calls import SystemCalls
from stowplan.run.offload.copying import Staging, read_back, write_out
from stowplan.run.offload.live import Look, bytes_of
from stowplan.run.offload.rates import rates_of
from stowplan.run.offload.spill import BLOCK, Extent, SpillFile, whole_blocks

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
        disk = os.statvfs(self.spill.folder)
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
        return probe_cache.user_folder("spill")
    except OSError as fault:
        raise BadUse("this user has no home folder: set STOWPLAN_SPILL to a folder on disk") from fault
