"""Copying a storage to a spill file and back, in chunks, through a staging buffer each way.

Direct transfers need aligned memory, which tensors are not. A checksum is taken on the way: what comes back
is what went out, or an error. Copies, checksums and transfers leave Python's lock to the ops meanwhile.
"""

import zlib
from concurrent.futures import Future
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from stowplan.errors import TierDamaged
from stowplan.run.offload.spill import BLOCK, Extent, SpillFile, whole_blocks
from stowplan.units import format_bytes

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
