"""Random streams of requests for the allocator's model, with its invariants and laws checked on the way."""

from random import Random

from stowplan.errors import OutOfDeviceMemory
from stowplan.ir.heap import BlockState, HeapBlock, HeapSegment
from stowplan.plan.allocator.caching import NOTHING, CachingAllocator
from stowplan.plan.allocator.settings import MIB, SMALL_REQUEST, AllocatorSettings
from tests.support.heap_invariants import broken_invariants

_STREAMS = 3
_SIZES = (512, 1024, 2048, MIB // 2, 3 * MIB, 12 * MIB)


def random_settings(random: Random) -> AllocatorSettings:
    """Any combination of settings, half of the time on a device that is soon full."""
    is_tight = random.random() < 0.5
    return AllocatorSettings(
        expandable_segments=random.random() < 0.4,
        max_split_bytes=random.choice((None, None, 21 * MIB, 64 * MIB)),
        roundup_power2_divisions=random.choice(((), (), (4,), (8,))),
        garbage_collection_threshold=random.choice((0.0, 0.6)) if is_tight else 0.0,
        capacity_bytes=random.choice((64, 200, 600)) * MIB if is_tight else None,
        fraction=random.choice((None, 0.5, 0.9)) if is_tight else None,
    )


def random_size(random: Random) -> int:
    """Mostly powers of two and their neighbours, from a few bytes to 64 MiB."""
    size = 2 ** random.randint(4, 26)
    return max(1, random.choice((size, size + 1, size - 1, random.randint(1, size), 10 * MIB, MIB)))


def run_stream(seed: int, events: int, *, laws: bool) -> int:
    """Issue random requests; AssertionError names the seed and the law that is broken. Counts the events.

    With `laws` each allocation is compared with the blocks that were free before, which takes longer.
    """
    random = Random(seed)
    allocator = CachingAllocator(random_settings(random))
    living: list[int] = []
    streams = random.choice((1, 1, _STREAMS))  # with one stream, and few sizes, blocks meet their neighbours
    sizes = random.choice((None, random.sample(_SIZES, 2)))
    for number in range(events):
        where = f"seed {seed}, event {number}"
        match random.randrange(20):
            case 0 if living:
                allocator.record_stream(random.choice(living), random.randrange(streams))
            case 1:
                allocator.pass_events(random.randrange(streams))
            case 2 if random.random() < 0.2:
                allocator.empty_cache()
            case kind if kind < 11 and living:
                allocator.free(living.pop(random.randrange(len(living))))
            case _:
                nbytes = random_size(random) if sizes is None else random.choice(sizes)
                request = (
                    nbytes,
                    random.randrange(streams),
                    random.choice((0, 0, 0, 1)) if streams > 1 else 0,
                )
                _malloc(allocator, request, living, where, laws=laws)
        if laws:
            faults = broken_invariants(allocator)
            assert not faults, f"{where}: {faults[0]}"
    faults = broken_invariants(allocator)
    assert not faults, f"seed {seed}: {faults[0]}"
    _drain(allocator, living, seed)
    return events


def _malloc(
    allocator: CachingAllocator, request: tuple[int, int, int], living: list[int], where: str, *, laws: bool
) -> None:
    nbytes, stream, pool = request
    before = allocator.segments() if laws and not allocator._pending else None
    try:
        address = allocator.malloc(nbytes, stream, pool)
    except OutOfDeviceMemory:
        address = NOTHING
    if address == NOTHING:
        limit = allocator.settings.allowed_bytes or allocator.settings.capacity_bytes
        assert limit is not None, f"{where}: refused without a limit"
        assert allocator.reserved_bytes + allocator.settings.block_bytes(nbytes) + 20 * MIB > limit, where
        return
    assert address not in living, f"{where}: handed out twice"
    living.append(address)
    if before is not None:
        _check_placement(allocator, before, (address, nbytes, stream, pool), where)


def _check_placement(
    allocator: CachingAllocator,
    before: tuple[HeapSegment, ...],
    request: tuple[int, int, int, int],
    where: str,
) -> None:
    """Best fit, and the law of splitting, against a plain scan of the blocks that were free."""
    address, nbytes, stream, pool = request
    settings = allocator.settings
    size = settings.block_bytes(nbytes)
    is_small = size <= SMALL_REQUEST
    block = next(b for segment in allocator.segments() for b in segment.blocks if b.address == address)
    assert (block.state, block.requested_bytes) == (BlockState.ALLOCATED, nbytes), where
    assert block.nbytes >= size, where
    if is_small or settings.expandable_segments:
        assert block.nbytes == size, f"{where}: slack where none may be"
    elif settings.max_split_bytes is None:
        assert block.nbytes - size <= SMALL_REQUEST, f"{where}: too much slack"
    if settings.expandable_segments or settings.max_split_bytes is not None:
        return
    free: list[HeapBlock] = [
        b
        for segment in before
        if (segment.is_small, segment.stream, segment.pool) == (is_small, stream, pool)
        for b in segment.blocks
        if b.state is BlockState.FREE and b.nbytes >= size
    ]
    best = min(free, key=lambda b: (b.nbytes, b.address), default=None)
    if best is not None:
        assert address == best.address, f"{where}: not the best fit"
    else:
        known = [(segment.address, segment.address + segment.nbytes) for segment in before]
        inside = any(start <= address < end for start, end in known)
        assert not inside or allocator.retries, f"{where}: an old segment where none fits"


def _drain(allocator: CachingAllocator, living: list[int], seed: int) -> None:
    """When all is freed and released, nothing is left."""
    for address in living:
        allocator.free(address)
    allocator.release_pool(1)
    allocator.empty_cache()
    figures = allocator.figures()
    assert (figures.active_bytes, figures.reserved_bytes, allocator.segments()) == (0, 0, ()), f"seed {seed}"
