"""Heap: the memory that a caching allocator holds, block by block, and the history of its requests."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple


class BlockState(StrEnum):
    """What a block is used for."""

    ALLOCATED = "allocated"
    WAITING = "waiting"  # freed, but a stream that used it is not done
    FREE = "free"


class HeapBlock(NamedTuple):
    """A piece of a segment. `nbytes` is at least the request: rounding and slack are part of the block."""

    address: int
    nbytes: int
    requested_bytes: int
    state: BlockState


@dataclass(frozen=True, slots=True)
class HeapSegment:
    """Memory that the allocator took from the device at once, or, if expandable, mapped side by side.

    The blocks tile the segment in order of address.
    """

    address: int
    nbytes: int
    is_small: bool
    blocks: tuple[HeapBlock, ...]
    stream: int = 0
    pool: int = 0
    is_expandable: bool = False


class HeapAction(StrEnum):
    """What the allocator did. The values are PyTorch's."""

    ALLOC = "alloc"
    FREE = "free_completed"  # at the moment the block can be used again
    SEGMENT_ALLOC = "segment_alloc"
    SEGMENT_FREE = "segment_free"
    SEGMENT_MAP = "segment_map"
    SEGMENT_UNMAP = "segment_unmap"


class HeapEvent(NamedTuple):
    """One action. For allocations and frees `nbytes` is the size as requested."""

    action: HeapAction
    address: int
    nbytes: int
    stream: int = 0


@dataclass(frozen=True, slots=True)
class HeapTrace:
    """What an allocator recorded: the events in order, and the segments after the last of them.

    `settings` is the configuration in the spelling of PYTORCH_CUDA_ALLOC_CONF, "" for the defaults.
    """

    events: tuple[HeapEvent, ...]
    after: tuple[HeapSegment, ...]
    settings: str = ""


MOST_BYTES = 2**62
GRAIN = 512
"""Blocks and segments are multiples of this many bytes."""


def fault_in(trace: HeapTrace) -> str:
    """What cannot be in a trace, if anything: blocks that do not tile a segment, segments that overlap."""
    if not all(0 <= event.address < MOST_BYTES and 0 <= event.nbytes < MOST_BYTES for event in trace.events):
        return f"an event with an address or a size that is not within 0 and {MOST_BYTES}"
    for segment in trace.after:
        if not _is_tiled(segment.address, segment.nbytes, segment.blocks):
            return f"the blocks of segment {segment.address:#x} do not tile it"
    ends = sorted((segment.address, segment.address + segment.nbytes) for segment in trace.after)
    if any(end > start for (_, end), (start, _) in pairwise(ends)):
        return "segments overlap"
    return ""


def _is_tiled(address: int, nbytes: int, blocks: Iterable[HeapBlock]) -> bool:
    end = address + nbytes
    for block in blocks:
        is_sized = 0 < block.nbytes < MOST_BYTES and block.nbytes % GRAIN == 0
        if block.address != address or not is_sized or not 0 <= block.requested_bytes <= block.nbytes:
            return False
        address += block.nbytes
    return 0 <= address == end < 2 * MOST_BYTES and nbytes > 0
