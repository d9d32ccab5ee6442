"""SpillFile: a file without a name, in which storages wait on disk.

Nobody else can open it, and the system takes it away with the process that made it, however that ends: there
is never anything to clean up. Where the disk allows, it is read and written past the system's own cache, so
that what is spilled does not stay in memory by another name.
"""

import fcntl
import os
import tempfile
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from errno import EDQUOT, EIO, ENOSPC
from pathlib import Path

from stowplan.errors import BadUse, TierFailed, TierFull
from stowplan.techniques.offload.run.calls import SystemCalls
from stowplan.units import format_bytes

BLOCK = 4096  # what direct transfers are multiples of, in length, place and address
_PREFIX = "stowplan-spill-"


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Extent:
    """A stretch of the file that belongs to one storage; it is given back when nobody holds it any more."""

    offset: int
    nbytes: int


def whole_blocks(nbytes: int) -> int:
    """`nbytes`, up to the next whole block."""
    return -(-nbytes // BLOCK) * BLOCK


class SpillFile:
    """Stretches of the file are handed out, and used again for storages of the same size."""

    def __init__(self, folder: Path, *, direct: bool, calls: SystemCalls) -> None:
        self.folder, self._calls = folder, calls
        self._process = os.getpid()
        self.file, self.is_direct = _opened(folder, direct)
        self._end, self._growing = 0, threading.Lock()
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # offsets by size; safe from any thread
        self._closing = weakref.finalize(self, os.close, self.file)

    @property
    def nbytes(self) -> int:
        """How long the file is."""
        return self._end

    def close(self) -> None:
        """Delete the file with everything in it."""
        self._closing()

    def take(self, nbytes: int) -> Extent:
        """Room for `nbytes`; raises TierFull if the disk has none."""
        if os.getpid() != self._process:
            raise BadUse("a spill file cannot be shared with a process forked off: open a tier there")
        size = max(BLOCK, whole_blocks(nbytes))
        try:
            offset = self._free[size].pop()
        except IndexError:
            offset = self._grow(size)
        extent = Extent(offset, nbytes)
        weakref.finalize(extent, self._free[size].append, offset).atexit = False
        return extent

    def _grow(self, size: int) -> int:
        with self._growing:
            offset = self._end
            try:
                self._calls.allocate(self.file, offset, size)
            except OSError as fault:
                raise self._fault(fault, "set aside", size) from fault
            self._end = offset + size
        return offset

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` at a place."""
        self._move(self._calls.write, data, offset, "write")

    def read(self, data: memoryview, offset: int) -> None:
        """Fill all of `data` from a place."""
        self._move(self._calls.read, data, offset, "read")

    def flush(self) -> None:
        """See to it that what was written is in the file and not in memory."""
        if not self.is_direct:
            try:
                self._calls.flush(self.file)
            except OSError as fault:
                raise self._fault(fault, "flush", self._end) from fault

    def _move(
        self,
        call: Callable[[int, memoryview, int], int],
        data: memoryview,
        offset: int,
        doing: str,
    ) -> None:
        done = 0
        try:
            while done < len(data):
                moved = call(self.file, data[done:], offset + done)
                if not moved:
                    raise OSError(EIO, "the file has no more room or bytes there")
                done += moved
        except OSError as fault:
            raise self._fault(fault, doing, len(data)) from fault

    def _fault(self, fault: OSError, doing: str, nbytes: int) -> TierFailed:
        where = f"{self.folder}: cannot {doing} {format_bytes(nbytes)} of {format_bytes(self._end)}"
        if fault.errno in (ENOSPC, EDQUOT):
            return TierFull(f"{where}: the disk is full; free some of it, or spill to another folder")
        return TierFailed(f"{where}: {fault.strerror or fault}")


def _opened(folder: Path, direct: bool) -> tuple[int, bool]:
    """A nameless file in the folder, which is made for its owner alone if it is not there."""
    if not hasattr(os, "O_TMPFILE") or not hasattr(os, "posix_fallocate"):
        raise BadUse("the disk tier sets room aside in files without names, which this system does not have")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if direct:
            with suppress(OSError):  # not every file system can
                return _nameless(folder, os.O_DIRECT), True
        return _nameless(folder, 0), False
    except OSError as fault:
        raise TierFailed(f"{folder}: cannot make a file there: {fault.strerror or fault}") from fault


def _nameless(folder: Path, flags: int) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | flags, 0o600)
    except OSError:  # a file system that gives every file a name, if only for a moment
        file, name = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
        Path(name).unlink(missing_ok=True)
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, flags)
        except OSError:
            os.close(file)
            raise
        return file
