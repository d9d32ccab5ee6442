"""A recorded trace through the model: request by request, at the recorded addresses or at its own.

With the recorded addresses of segments the model has to give every recorded block and segment. With
addresses of its own, and with other settings, it says what the same requests would have taken.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from stowplan.ir.heap import BlockState, HeapAction, HeapEvent, HeapSegment
from stowplan.plan.allocator.caching import NOTHING, CachingAllocator, HeapFigures
from stowplan.plan.allocator.settings import SEGMENT_STEP, AllocatorSettings

_TAKEN = (HeapAction.SEGMENT_ALLOC, HeapAction.SEGMENT_MAP)
_GIVEN_BACK = (HeapAction.SEGMENT_FREE, HeapAction.SEGMENT_UNMAP)


@dataclass(frozen=True, slots=True)
class Replay:
    """What the model made of a trace.

    `misplaced` counts requests that it placed at another address than the trace, `segment_faults` segments
    that it took or released at another moment or in another size. Both are 0 in a run at its own addresses.
    """

    figures: HeapFigures
    segments: tuple[HeapSegment, ...]
    requests: int
    misplaced: int = 0
    segment_faults: int = 0
    unmatched: int = 0  # frees without an allocation, and allocations where something was


@dataclass(slots=True)
class _Recorded:
    """The segments that the trace took and released since the last request, beside those of the model."""

    taken: list[tuple[int, int]] = field(default_factory=list)
    released: set[tuple[int, int]] = field(default_factory=set)
    ours_taken: list[tuple[int, int]] = field(default_factory=list)
    ours_released: set[tuple[int, int]] = field(default_factory=set)
    held: list[tuple[int, int]] = field(default_factory=list)  # start and end of each segment, in order
    beyond: int = 2**64  # an address that no segment of the trace has

    def place(self, nbytes: int) -> int:
        """The recorded address, if the trace takes as much here and where nothing is."""
        at = len(self.ours_taken)
        if at < len(self.taken) and self.taken[at][1] == nbytes and self._is_vacant(*self.taken[at]):
            return self.taken[at][0]
        address = self.beyond
        self.beyond += -(-nbytes // SEGMENT_STEP) * SEGMENT_STEP
        return address

    def _is_vacant(self, address: int, nbytes: int) -> bool:
        after = bisect_left(self.held, (address, 0))
        is_before_next = after == len(self.held) or address + nbytes <= self.held[after][0]
        return is_before_next and (after == 0 or self.held[after - 1][1] <= address)

    def observe(self, event: HeapEvent) -> None:
        """Hear of a segment that the model takes or releases."""
        action, address, nbytes, _ = event
        if action in _TAKEN:
            self.ours_taken.append((address, nbytes))
            insort(self.held, (address, address + nbytes))
        else:
            self.ours_released.add((address, nbytes))
            self.held.remove((address, address + nbytes))

    def faults(self) -> int:
        """Segments that only one of both took or released; begins anew."""
        count = len(set(self.taken) ^ set(self.ours_taken)) + len(self.released ^ self.ours_released)
        for seen in (self.taken, self.ours_taken, self.released, self.ours_released):
            seen.clear()
        return count


def replay(
    before: Sequence[HeapSegment], events: Sequence[HeapEvent], settings: AllocatorSettings | None = None
) -> Replay:
    """Follow a trace from its first segments on, at the recorded addresses."""
    recorded = _Recorded(held=[(s.address, s.address + s.nbytes) for s in _in_order(before)])
    allocator = CachingAllocator(settings, place=recorded.place, observe=recorded.observe)
    allocator.restore(before)
    return _followed(allocator, events, {address: address for address in _allocated(before)}, recorded)


def free_run(
    before: Sequence[HeapSegment], events: Sequence[HeapEvent], settings: AllocatorSettings | None = None
) -> Replay:
    """The same requests from the same layout, at addresses of the model's own."""
    allocator = CachingAllocator(settings)
    moved = _moved(before)
    allocator.restore(moved)
    ours = dict(zip(_allocated(before), _allocated(moved), strict=True))
    return _followed(allocator, events, ours, None)


def cold_run(
    before: Sequence[HeapSegment], events: Sequence[HeapEvent], settings: AllocatorSettings | None = None
) -> Replay:
    """The same requests with any settings, after the blocks that were there before, in order of address."""
    allocator = CachingAllocator(settings)
    ours = {
        block.address: allocator.malloc(block.requested_bytes, segment.stream, segment.pool)
        for segment in _in_order(before)
        for block in segment.blocks
        if block.state is not BlockState.FREE
    }
    return _followed(allocator, events, ours, None)


def _in_order(segments: Iterable[HeapSegment]) -> list[HeapSegment]:
    return sorted(segments, key=lambda segment: segment.address)


def _allocated(segments: Iterable[HeapSegment]) -> list[int]:
    """The addresses of all blocks that are not free."""
    blocks = (block for segment in _in_order(segments) for block in segment.blocks)
    return [block.address for block in blocks if block.state is not BlockState.FREE]


def _moved(before: Iterable[HeapSegment]) -> list[HeapSegment]:
    """The segments in their order, side by side from address 0."""
    moved: list[HeapSegment] = []
    end = 0
    for segment in _in_order(before):
        shift = end - segment.address
        blocks = tuple(block._replace(address=block.address + shift) for block in segment.blocks)
        moved.append(replace(segment, address=end, blocks=blocks))
        end += -(-segment.nbytes // SEGMENT_STEP) * SEGMENT_STEP
    return moved


def _followed(
    allocator: CachingAllocator, events: Sequence[HeapEvent], ours: dict[int, int], recorded: _Recorded | None
) -> Replay:
    """Issue the requests of a trace; `ours` has the model's address for that of each block that is there."""
    requests = misplaced = faults = unmatched = 0
    releasing = False
    for action, address, nbytes, stream in events:
        if action in _GIVEN_BACK:
            if not releasing:
                allocator.empty_cache()
            releasing = True
            if recorded:
                recorded.released.add((address, nbytes))
            continue
        if releasing and recorded:
            faults += recorded.faults()
        releasing = False
        if action is HeapAction.ALLOC:
            if address in ours:
                unmatched += 1
                allocator.free(ours.pop(address))
            ours[address] = placed = allocator.malloc(nbytes, stream)
            requests += 1
            if recorded:
                misplaced += placed != address
                faults += recorded.faults()
        elif action is HeapAction.FREE:
            unmatched += address not in ours
            allocator.free(ours.pop(address, NOTHING))
        elif action in _TAKEN and recorded:
            recorded.taken.append((address, nbytes))
    if recorded:
        faults += recorded.faults()
    return Replay(allocator.figures(), allocator.segments(), requests, misplaced, faults, unmatched)
