"""The invariants of the allocator's model, checked on all that it holds."""

from collections.abc import Iterator
from itertools import pairwise

from stowplan.plan.allocator.blocks import ADDRESS_BITS, ALLOCATED, FREE, UNMAPPED, WAITING, Block
from stowplan.plan.allocator.caching import CachingAllocator
from stowplan.plan.allocator.settings import LARGE_SEGMENT, SMALLEST_BLOCK


def broken_invariants(allocator: CachingAllocator) -> tuple[str, ...]:
    """What is wrong with an allocator's state; empty for every state that requests can lead to."""
    return (*_tiling(allocator), *_lists(allocator), *_sums(allocator))


def _tiling(allocator: CachingAllocator) -> Iterator[str]:
    """Blocks tile their segments, neighbours are merged, segments do not overlap."""
    count = 0
    for held in allocator.ranges.values():
        before: Block | None = None
        for block in allocator.blocks_in(held):
            where = f"at block {block.address:#x}"
            count += 1
            if block.size <= 0 or block.size % SMALLEST_BLOCK:
                yield f"a size of {block.size} {where}"
            if block.prev is not before or allocator.block_at.get(block.address) is not block:
                yield f"broken links {where}"
            if (block.stream, block.heap) != (held.stream, held.heap):
                yield f"another heap {where}"
            if before is not None and before.address + before.size != block.address:
                yield f"a gap or an overlap {where}"
            if before is not None and before.state == block.state and block.state in (FREE, UNMAPPED):
                yield f"unmerged neighbours {where}"
            before = block
    if count != len(allocator.block_at):
        yield "blocks outside of segments"
    ends = [(segment.address, segment.address + segment.nbytes) for segment in allocator.segments()]
    if any(end > start for (_, end), (start, _) in pairwise(sorted(ends))):
        yield "segments overlap"


def _lists(allocator: CachingAllocator) -> Iterator[str]:
    """The lists are sorted, and hold exactly the free and the unmapped blocks of their heap and stream."""
    free: dict[tuple[int, bool, int], list[int]] = {}
    unmapped: dict[tuple[int, bool, int], list[int]] = {}
    for block in allocator.block_at.values():
        name = (block.heap.pool, block.heap.is_small, block.stream)
        if block.state == FREE:
            free.setdefault(name, []).append(block.size << ADDRESS_BITS | block.address)
        elif block.state == UNMAPPED:
            unmapped.setdefault(name, []).append(block.address)
    for heap in (heap for heaps in allocator.heaps.values() for heap in heaps):
        for what, lists, found in (("free", heap.free, free), ("unmapped", heap.unmapped, unmapped)):
            for stream, keys in lists.items():
                if keys != sorted(found.pop((heap.pool, heap.is_small, stream), [])):
                    yield f"a list of {what} blocks of stream {stream} is not those that there are"
    if free or unmapped:
        yield "free blocks in no list"


def _sums(allocator: CachingAllocator) -> Iterator[str]:
    """The counters are the sums over the blocks, in order, and within the limits."""
    blocks = allocator.block_at.values()
    held = {state: sum(b.size for b in blocks if b.state == state) for state in (FREE, ALLOCATED, WAITING)}
    requested = sum(block.requested for block in blocks if block.state == ALLOCATED)
    active = held[ALLOCATED] + held[WAITING]
    figures = allocator.figures()
    counted = (figures.requested_bytes, figures.allocated_bytes, figures.active_bytes, figures.reserved_bytes)
    if counted != (requested, held[ALLOCATED], active, active + held[FREE]):
        yield f"counters {counted} are not the sums over the blocks"
    peaks = (
        figures.requested_peak_bytes,
        figures.allocated_peak_bytes,
        figures.active_peak_bytes,
        figures.reserved_peak_bytes,
    )
    if list(counted) != sorted(counted) or list(peaks) != sorted(peaks):
        yield "requested <= allocated <= active <= reserved does not hold"
    settings = allocator.settings
    page = (
        LARGE_SEGMENT * settings.expandable_segments
    )  # the fraction is compared before pages are rounded up
    capacity, allowed = settings.capacity_bytes, settings.allowed_bytes
    if (capacity is not None and figures.reserved_bytes > capacity) or (
        allowed is not None and figures.reserved_bytes > allowed + page
    ):
        yield f"{figures.reserved_bytes} bytes are reserved, more than the device has"
