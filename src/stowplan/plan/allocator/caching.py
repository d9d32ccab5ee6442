"""CachingAllocator: where PyTorch's allocator for CUDA places each request, and what it takes from the card.

Types. A *segment* is memory taken from the device at once. *Blocks* tile it, in a list of neighbours. A block
belongs to one stream and one *heap*: small or large, of the common pool or of a private one. A block is

    FREE        in its heap's list, sorted by (size, address), one list for each stream
    ALLOCATED   handed out
    WAITING     freed, but events on the streams that used it have not passed
    UNMAPPED    address space of an expandable segment without memory

Rules, each in the function that is named.

    malloc      poll the events; round the size up; take the smallest free block of the stream that is large
                enough, the lowest address among equals (`_fit`); else new memory (`_grow`). The front is
                handed out. The rest becomes a free block: in the small heap from 512 bytes on, in the large
                heap only above 1 MiB. A smaller rest stays in the block as slack.
    free        a block that other streams used waits for an event on each of them; others are free at once
                and merge with free neighbours (`_settle`).
    _grow       callbacks; garbage collection; a new segment; oversize blocks released, if `max_split_size` is
                set; everything that is wholly free released; then OutOfDeviceMemory.
    _mapped     expandable segments: pages are mapped at the lowest address where free and unmapped room
                suffices.

Invariants, which `invariants.py` checks: blocks tile their segments; neighbours are not both free or both
unmapped; the lists hold exactly the free blocks; requested <= allocated <= active <= reserved; the counters
are the sums over the blocks.

Addresses of new segments come from `place`, by default one after the other. The order of addresses decides
only between free blocks of equal size. CUDA graphs are modelled by their private pools alone: what a capture
in progress forbids is not.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from stowplan.errors import BadUse, OutOfDeviceMemory
from stowplan.ir.heap import BlockState, HeapAction, HeapBlock, HeapEvent, HeapSegment
from stowplan.plan.allocator.blocks import (
    ADDRESS,
    ADDRESS_BITS,
    ALLOCATED,
    FREE,
    UNMAPPED,
    WAITING,
    Block,
    Heap,
    Range,
    heaps_of,
)
from stowplan.plan.allocator.settings import (
    LARGE_SEGMENT,
    SEGMENT_STEP,
    SMALL_REQUEST,
    SMALL_SEGMENT,
    SMALLEST_BLOCK,
    AllocatorSettings,
    segment_bytes,
)

NOTHING = -1
"""The address of a request of 0 bytes, for which no block is taken."""

_BOUNDLESS = 1 << 40  # address space of an expandable segment on a device of unknown capacity


@dataclass(frozen=True, slots=True)
class HeapFigures:
    """What an allocator holds now and held at most.

    Requested: as asked for. Allocated: blocks, with rounding and slack (`memory_allocated`). Active:
    allocated, or waiting for a stream. Reserved: segments, or mapped pages (`memory_reserved`).
    """

    requested_bytes: int
    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int
    requested_peak_bytes: int
    allocated_peak_bytes: int
    active_peak_bytes: int
    reserved_peak_bytes: int
    retries: int  # how often everything that was free had to be released for a request

    @property
    def overhead(self) -> float:
        """Reserved over requested bytes, both at their peaks."""
        return self.reserved_peak_bytes / self.requested_peak_bytes if self.requested_peak_bytes else 1.0


class CachingAllocator:
    """The model. `malloc` returns addresses; streams and private pools are known by numbers."""

    __slots__ = (
        "_allowed",
        "_callbacks",
        "_capacity",
        "_end",
        "_expandable",
        "_freeable",
        "_max_split",
        "_observe",
        "_passed",
        "_pending",
        "_place",
        "_recorded",
        "_rounded",
        "active_bytes",
        "active_peak_bytes",
        "allocated_bytes",
        "allocated_peak_bytes",
        "block_at",
        "heaps",
        "ranges",
        "requested_bytes",
        "requested_peak_bytes",
        "reserved_bytes",
        "reserved_peak_bytes",
        "retries",
        "settings",
    )

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        *,
        place: Callable[[int], int] | None = None,
        observe: Callable[[HeapEvent], None] | None = None,
        callbacks: Sequence[Callable[[], bool]] = (),
    ) -> None:
        """`place` gives the address for a segment of a size, `observe` hears of segments that come and go,
        and `callbacks` free memory when no block fits and say whether they did."""
        self.settings = settings or AllocatorSettings()
        self._place, self._observe, self._callbacks = place or self._next_place, observe, callbacks
        self._expandable, self._max_split = self.settings.expandable_segments, self.settings.max_split_bytes
        self._capacity, self._allowed = self.settings.capacity_bytes, self.settings.allowed_bytes
        self._rounded = self.settings.block_bytes if self.settings.roundup_power2_divisions else None
        self.block_at: dict[int, Block] = {}
        self.ranges: dict[int, Range] = {}
        self.heaps: dict[int, tuple[Heap, Heap]] = {0: heaps_of(0)}
        self._freeable: set[int] = set()
        self._pending: dict[int, deque[tuple[int, Block]]] = {}  # by stream: number of the event, block
        self._recorded: dict[int, int] = {}
        self._passed: dict[int, int] = {}
        self._end = 0
        self.requested_bytes = self.allocated_bytes = self.active_bytes = self.reserved_bytes = 0
        self.requested_peak_bytes = self.allocated_peak_bytes = 0
        self.active_peak_bytes = self.reserved_peak_bytes = self.retries = 0

    # Requests

    def malloc(self, nbytes: int, stream: int = 0, pool: int = 0) -> int:
        """The address of a block for a request; OutOfDeviceMemory if there is none, after a retry."""
        if nbytes <= 0:
            return NOTHING
        if self._pending:
            self._poll()
        size = (nbytes + 511) & -512 if self._rounded is None else self._rounded(nbytes)
        heaps = self.heaps.get(pool) or self._open(pool)
        heap = heaps[size > SMALL_REQUEST]
        block = self._fit(heap, stream, size) or self._grow(heap, stream, size, nbytes)
        rest = block.size - size
        if rest and (
            rest >= SMALLEST_BLOCK
            if heap.is_small or self._expandable
            else rest > SMALL_REQUEST and (self._max_split is None or size < self._max_split)
        ):
            self._list(self._cut(block, size))
        block.state, block.requested = ALLOCATED, nbytes
        size = block.size
        self.requested_bytes = total = self.requested_bytes + nbytes
        if total > self.requested_peak_bytes:
            self.requested_peak_bytes = total
        self.allocated_bytes = total = self.allocated_bytes + size
        if total > self.allocated_peak_bytes:
            self.allocated_peak_bytes = total
        self.active_bytes = total = self.active_bytes + size
        if total > self.active_peak_bytes:
            self.active_peak_bytes = total
        return block.address

    def free(self, address: int) -> None:
        """Give a block back; it waits for the streams that `record_stream` named."""
        if address == NOTHING:
            return
        block = self._allocated(address)
        self.allocated_bytes -= block.size
        self.requested_bytes -= block.requested
        if not block.uses:
            self._release(block)
            return
        block.state = WAITING
        for stream in sorted(block.uses):
            number = self._recorded.get(stream, 0) + 1
            self._recorded[stream] = number
            self._pending.setdefault(stream, deque()).append((number, block))
        block.events, block.uses = len(block.uses), None

    def record_stream(self, address: int, stream: int) -> None:
        """Another stream uses the block: once freed, it waits for an event there."""
        if address == NOTHING:
            return
        block = self._allocated(address)
        if stream != block.stream:
            if block.uses is None:
                block.uses = set()
            block.uses.add(stream)

    def pass_events(self, stream: int) -> None:
        """All events recorded on a stream so far have passed. The next request notices."""
        self._passed[stream] = self._recorded.get(stream, 0)

    def empty_cache(self) -> None:
        """Wait for all streams, and release all segments and pages that are wholly free."""
        for stream in tuple(self._pending):
            self.pass_events(stream)
        self._poll()
        for pool, heaps in self.heaps.items():
            if pool == 0 or pool in self._freeable:
                for heap in reversed(heaps):
                    self._release_free(heap)

    def release_pool(self, pool: int) -> None:
        """A private pool is no longer used: its free segments can be released from now on."""
        self._freeable.add(pool)

    def _allocated(self, address: int) -> Block:
        block = self.block_at.get(address)
        if block is None or block.state != ALLOCATED:
            raise BadUse(f"no allocated block begins at address {address:#x}")
        return block

    def _open(self, pool: int) -> tuple[Heap, Heap]:
        self.heaps[pool] = heaps = heaps_of(pool)
        return heaps

    # Blocks

    def _fit(self, heap: Heap, stream: int, size: int) -> Block | None:
        """Take the free block that fits best out of its list."""
        keys = heap.free.get(stream)
        heap.searches += 1
        if not keys:
            return None
        index = bisect_left(keys, size << ADDRESS_BITS)
        if index == len(keys):
            return None
        if self._expandable:
            index = self._least_expandable(keys, index)
        block = self.block_at[keys[index] & ADDRESS]
        limit = self._max_split
        if limit is not None:
            if size < limit <= block.size:
                return None
            if size >= limit and block.size >= size + self.settings.max_non_split_rounding_bytes:
                return None
        del keys[index]
        return block

    def _least_expandable(self, keys: list[int], index: int) -> int:
        """A block that can grow counts with the room after it: take a later one that has less room."""
        room = self._room(keys[index])
        while index + 1 < len(keys) and (later := self._room(keys[index + 1])) < room:
            index, room = index + 1, later
        return index

    def _room(self, key: int) -> int:
        block = self.block_at[key & ADDRESS]
        after = block.next
        return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)

    def _cut(self, block: Block, size: int) -> Block:
        """Cut a block that is in no list; returns its back, in the same state and in no list."""
        back = Block(block.address + size, block.size - size, block.stream, block.heap, block.state)
        back.prev, back.next = block, block.next
        if block.next is not None:
            block.next.prev = back
        block.next, block.size = back, size
        self.block_at[back.address] = back
        return back

    def _list(self, block: Block) -> None:
        """Put a free or an unmapped block into its list."""
        heap = block.heap
        if block.state == FREE:
            block.born = heap.searches
            keys, key = heap.free.get(block.stream), block.size << ADDRESS_BITS | block.address
            if keys is None:
                heap.free[block.stream] = [key]
            else:
                insort(keys, key)
        else:
            insort(heap.unmapped.setdefault(block.stream, []), block.address)

    def _unlist(self, block: Block) -> None:
        if block.state == FREE:
            keys, key = block.heap.free[block.stream], block.size << ADDRESS_BITS | block.address
        else:
            keys, key = block.heap.unmapped[block.stream], block.address
        del keys[bisect_left(keys, key)]

    def _release(self, block: Block) -> None:
        """Make an active block free."""
        self.active_bytes -= block.size
        block.state, block.requested = FREE, 0
        self._settle(block)

    def _settle(self, block: Block) -> Block:
        """List a free or unmapped block, as one with its neighbours in the same state."""
        before, after = block.prev, block.next
        if before is not None and before.state == block.state:
            self._unlist(before)
            block = self._joined(before, block)
        if after is not None and after.state == block.state:
            self._unlist(after)
            self._joined(block, after)
        self._list(block)
        return block

    def _joined(self, front: Block, back: Block) -> Block:
        """Two neighbours as one block."""
        del self.block_at[back.address]
        front.size += back.size
        front.next = after = back.next
        if after is not None:
            after.prev = front
        return front

    def _poll(self) -> None:
        """Free the blocks whose events have all passed; a stream's events pass in order."""
        for stream, queue in tuple(self._pending.items()):
            passed = self._passed.get(stream, 0)
            while queue and queue[0][0] <= passed:
                _, block = queue.popleft()
                block.events -= 1
                if not block.events:
                    self._release(block)
            if not queue:
                del self._pending[stream]

    # Memory from the device

    def _grow(self, heap: Heap, stream: int, size: int, nbytes: int) -> Block:
        """A block from new memory, after whatever has to be released for it."""
        freed = [callback() for callback in self._callbacks]  # all of them, whatever the first says
        if any(freed) and (block := self._fit(heap, stream, size)) is not None:
            return block
        if self._allowed is not None and self.settings.garbage_collection_threshold > 0.0:
            self._collect_garbage()
        block = self._new(heap, stream, size)
        if block is None and self._max_split is not None and self._release_oversize(heap, stream, size):
            block = self._new(heap, stream, size)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._new(heap, stream, size)
        if block is None:
            limit = self._allowed if self._allowed is not None else self._capacity
            raise OutOfDeviceMemory(
                nbytes,
                limit_bytes=limit or 0,
                allocated_bytes=self.allocated_bytes,
                reserved_bytes=self.reserved_bytes,
            )
        return block

    def _new(self, heap: Heap, stream: int, size: int) -> Block | None:
        """A free block, in no list, in a new segment or in newly mapped pages; None if the device is full."""
        taken = segment_bytes(size)
        if self._allowed is not None and self.reserved_bytes + taken > self._allowed:
            return None
        if self._expandable:
            return self._mapped(heap, stream, size)
        if not self._take(taken):
            return None
        address = self._place(taken)
        block = Block(address, taken, stream, heap, FREE)
        self.block_at[address] = block
        self.ranges[address] = Range(address, stream, heap)
        if self._observe is not None:
            self._observe(HeapEvent(HeapAction.SEGMENT_ALLOC, address, taken, stream))
        return block

    def _take(self, nbytes: int) -> bool:
        """Count memory as reserved, if the device has it."""
        if self._capacity is not None and self.reserved_bytes + nbytes > self._capacity:
            return False
        self.reserved_bytes += nbytes
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)
        return True

    def _next_place(self, nbytes: int) -> int:
        address = self._end
        self._end += -(-nbytes // SEGMENT_STEP) * SEGMENT_STEP
        return address

    def _give_back(self, block: Block) -> None:
        """Release a segment that is one free block, which is in no list any more."""
        del self.block_at[block.address], self.ranges[block.address]
        self.reserved_bytes -= block.size
        if self._observe is not None:
            self._observe(HeapEvent(HeapAction.SEGMENT_FREE, block.address, block.size, block.stream))

    def _release_free(self, heap: Heap) -> None:
        """Release the segments that are one free block, and the pages that are wholly free."""
        for stream in sorted(heap.free):
            for key in tuple(heap.free[stream]):
                block = self.block_at[key & ADDRESS]
                if self._page_of(block):
                    self._unmap(block)
                elif block.prev is None and block.next is None:
                    self._unlist(block)
                    self._give_back(block)

    def _release_oversize(self, heap: Heap, stream: int, size: int) -> bool:
        """Release one block of the size that is missing, or several oversize ones from the largest down."""
        limit = self._max_split
        assert limit is not None
        missing = max(size, limit)
        keys = heap.free.get(stream, [])
        index = bisect_left(keys, missing << ADDRESS_BITS)
        if index < len(keys) and not self._page_of(self.block_at[keys[index] & ADDRESS]):
            self._give_back(self.block_at[keys.pop(index) & ADDRESS])
            return True
        released = 0
        while released < missing and index:
            index -= 1
            block = self.block_at[keys[index] & ADDRESS]
            if block.size < limit:
                break
            if not self._page_of(block):
                del keys[index]
                released += block.size
                self._give_back(block)
        return released >= missing

    def _collect_garbage(self) -> None:
        """Release free segments of the large heap that were not used for longest, down to the threshold."""
        assert self._allowed is not None
        missing = self.reserved_bytes - int(self.settings.garbage_collection_threshold * self._allowed)
        heap = self.heaps[0][1]
        ages = {block: heap.searches - block.born for block in self._whole_free(heap)}
        total = sum(ages.values())
        progress = True
        while missing > 0 and ages and progress:
            oldest, progress = total / len(ages), False
            for block, age in tuple(ages.items()):
                if missing > 0 and age >= oldest:
                    progress = True
                    missing -= block.size
                    total -= ages.pop(block)
                    self._unlist(block)
                    self._give_back(block)

    def _whole_free(self, heap: Heap) -> Iterator[Block]:
        for stream in sorted(heap.free):
            for key in heap.free[stream]:
                block = self.block_at[key & ADDRESS]
                if block.prev is None and block.next is None and not self._page_of(block):
                    yield block

    # Expandable segments

    def _page_of(self, block: Block) -> int:
        """The page size of the segment that a block is in; 0 if it cannot expand."""
        if not self._expandable:
            return 0
        return SMALL_SEGMENT if block.heap.is_small else LARGE_SEGMENT

    def _mapped(self, heap: Heap, stream: int, size: int) -> Block | None:
        """Map pages until a free block holds `size`; returns it in no list."""
        block: Block | None = self._first_room(heap, stream, size)
        assert block is not None
        if block.state == UNMAPPED:
            block = self._map(block, min(block.size, size))
        while block is not None and block.size < size:
            after = block.next
            assert after is not None
            assert after.state == UNMAPPED
            block = self._map(after, min(size - block.size, after.size))
        if block is not None:
            self._unlist(block)
        return block

    def _first_room(self, heap: Heap, stream: int, size: int) -> Block:
        """The lowest block from which free and unmapped room suffices, in a new range if there is none."""
        for address in heap.unmapped.get(stream, ()):
            block = self.block_at[address]
            if block.prev is not None and block.prev.state == FREE:
                block = block.prev
            if self._has_room(block, size):
                return block
        page = SMALL_SEGMENT if heap.is_small else LARGE_SEGMENT
        total = _BOUNDLESS if self._capacity is None else self._capacity + self._capacity // 8
        room = -(-max(total, size) // page) * page
        address = -(-self._place(room + page) // page) * page
        block = Block(address, room, stream, heap, UNMAPPED)
        self.block_at[address] = block
        self.ranges[address] = Range(address, stream, heap)
        self._list(block)
        return block

    def _has_room(self, block: Block, size: int) -> bool:
        found = 0
        here: Block | None = block
        while here is not None and found < size and here.state in (FREE, UNMAPPED):
            found += here.size
            here = here.next
        return found >= size

    def _map(self, block: Block, size: int) -> Block | None:
        """Map the first pages of an unmapped block; returns the free block they are in, which is listed."""
        page = self._page_of(block)
        mapped = -(-size // page) * page
        if not self._take(mapped):
            return None
        if self._observe is not None:
            self._observe(HeapEvent(HeapAction.SEGMENT_MAP, block.address, mapped, block.stream))
        self._unlist(block)
        if mapped < block.size:
            self._list(self._cut(block, mapped))
        block.state = FREE
        return self._settle(block)

    def _unmap(self, block: Block) -> None:
        """Release the pages that lie wholly in a free block."""
        page = self._page_of(block)
        first, last = -(-block.address // page) * page, (block.address + block.size) // page * page
        if first >= last:
            return
        self._unlist(block)
        if first > block.address:
            front, block = block, self._cut(block, first - block.address)
            self._list(front)
        if last < block.address + block.size:
            self._list(self._cut(block, last - block.address))
        self.reserved_bytes -= block.size
        if self._observe is not None:
            self._observe(HeapEvent(HeapAction.SEGMENT_UNMAP, block.address, block.size, block.stream))
        block.state = UNMAPPED
        block = self._settle(block)
        if block.prev is None and block.next is None:
            self._unlist(block)
            del self.block_at[block.address], self.ranges[block.address]

    # What there is

    def figures(self) -> HeapFigures:
        """Bytes now and at their peaks."""
        return HeapFigures(
            self.requested_bytes,
            self.allocated_bytes,
            self.active_bytes,
            self.reserved_bytes,
            self.requested_peak_bytes,
            self.allocated_peak_bytes,
            self.active_peak_bytes,
            self.reserved_peak_bytes,
            self.retries,
        )

    def reset_peaks(self) -> None:
        """Count peaks from now on, as `reset_peak_memory_stats` does."""
        self.requested_peak_bytes, self.allocated_peak_bytes = self.requested_bytes, self.allocated_bytes
        self.active_peak_bytes, self.reserved_peak_bytes = self.active_bytes, self.reserved_bytes

    def segments(self) -> tuple[HeapSegment, ...]:
        """All segments with their blocks, in order of address; of an expandable one, each mapped stretch."""
        found: list[HeapSegment] = []
        for address in sorted(self.ranges):
            held = self.ranges[address]
            mapped = groupby(self.blocks_in(held), key=lambda block: block.state != UNMAPPED)
            for blocks in (tuple(map(_shown, group)) for is_mapped, group in mapped if is_mapped):
                first, last = blocks[0], blocks[-1]
                size = last.address + last.nbytes - first.address
                heap, stream = held.heap, held.stream
                found.append(
                    HeapSegment(
                        first.address, size, heap.is_small, blocks, stream, heap.pool, self._expandable
                    )
                )
        return tuple(found)

    def blocks_in(self, held: Range) -> Iterator[Block]:
        block: Block | None = self.block_at[held.address]
        while block is not None:
            yield block
            block = block.next

    def restore(self, segments: Sequence[HeapSegment]) -> None:
        """Begin with these segments; only at the start, without expandable ones. Waiting blocks count as
        allocated."""
        if self.ranges or self._expandable or any(segment.is_expandable for segment in segments):
            raise BadUse("only an allocator that holds nothing, without expandable segments, can be restored")
        for segment in segments:
            heaps = self.heaps.get(segment.pool) or self._open(segment.pool)
            heap = heaps[not segment.is_small]
            self.ranges[segment.address] = Range(segment.address, segment.stream, heap)
            self._take(segment.nbytes)
            self._end = max(self._end, segment.address + segment.nbytes)
            before: Block | None = None
            for address, nbytes, requested, state in segment.blocks:
                is_free = state is BlockState.FREE
                block = Block(address, nbytes, segment.stream, heap, FREE if is_free else ALLOCATED)
                block.prev = before
                if before is not None:
                    before.next = block
                self.block_at[address] = before = block
                if is_free:
                    self._list(block)
                else:
                    block.requested = requested
                    self.allocated_bytes += nbytes
                    self.requested_bytes += requested
        self._end = -(-self._end // SEGMENT_STEP) * SEGMENT_STEP
        self.active_bytes = self.active_peak_bytes = self.allocated_peak_bytes = self.allocated_bytes
        self.requested_peak_bytes = self.requested_bytes


def _shown(block: Block) -> HeapBlock:
    return HeapBlock(block.address, block.size, block.requested, _STATES[block.state])


_STATES = {FREE: BlockState.FREE, ALLOCATED: BlockState.ALLOCATED, WAITING: BlockState.WAITING}
