"""The segments before a trace, from those after it: its events undone from the last to the first.

A snapshot shows the segments at its end alone. A block that was freed in the trace is known by its requested
size. Its slack follows from its neighbours: the large heap has no block of 1 MiB or less, so a small gap
after a block belongs to it. Slack before a free block cannot be told from that, and counts as part of it.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

from stowplan.ir.heap import BlockState, HeapAction, HeapBlock, HeapSegment, HeapTrace
from stowplan.plan.allocator.settings import SMALL_REQUEST, SMALL_SEGMENT, AllocatorSettings


def segments_before(trace: HeapTrace, settings: AllocatorSettings) -> tuple[HeapSegment, ...]:
    """The segments as they were before the first event; blocks in them are allocated or free."""
    segments = {segment.address: replace(segment, blocks=()) for segment in trace.after}
    final = {block.address: block for segment in trace.after for block in segment.blocks}
    living = {address: block for address, block in final.items() if block.state is not BlockState.FREE}
    for action, address, nbytes, stream in reversed(trace.events):
        match action:
            case HeapAction.ALLOC:
                living.pop(address, None)
            case HeapAction.FREE:
                size = settings.block_bytes(nbytes)
                living[address] = HeapBlock(address, size, nbytes, BlockState.ALLOCATED)
            case HeapAction.SEGMENT_ALLOC:
                segments.pop(address, None)
            case HeapAction.SEGMENT_FREE:
                segments[address] = HeapSegment(address, nbytes, nbytes == SMALL_SEGMENT, (), stream)
    return tuple(_filled(segments, living, settings))


def _filled(
    segments: Mapping[int, HeapSegment], living: Mapping[int, HeapBlock], settings: AllocatorSettings
) -> Iterator[HeapSegment]:
    """The segments with their blocks, and free blocks between them."""
    starts = sorted(living)
    for address in sorted(segments):
        segment = segments[address]
        end = address + segment.nbytes
        blocks: list[HeapBlock] = []
        here = starts[bisect_left(starts, address) : bisect_left(starts, end)]
        at = address
        for start, after in pairwise((*here, end)):
            if start > at:
                blocks.append(HeapBlock(at, start - at, 0, BlockState.FREE))
            block = living[start]
            size = _with_slack(block, after - start, settings, is_small=segment.is_small)
            blocks.append(block._replace(nbytes=size, state=BlockState.ALLOCATED))
            at = start + size
        if at < end:
            blocks.append(HeapBlock(at, end - at, 0, BlockState.FREE))
        yield replace(segment, blocks=tuple(blocks))


def _with_slack(block: HeapBlock, room: int, settings: AllocatorSettings, *, is_small: bool) -> int:
    """The bytes of a block in the room up to the next allocated one."""
    gap = room - block.nbytes
    whole = settings.max_split_bytes is not None and block.nbytes >= settings.max_split_bytes
    if gap < 0 or whole or (not is_small and gap <= SMALL_REQUEST and not settings.expandable_segments):
        return room
    return block.nbytes
