"""Heap: the memory that a caching allocator holds, block by block, and the history of its requests."""

from dataclasses import dataclass
from enum import StrEnum
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
    FREE_REQUESTED = "free_requested"
    FREE = "free_completed"
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
