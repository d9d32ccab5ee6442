"""Held blocks: bring a caching allocator to place what ops allocate at the offsets of a packing.

A packing of a step's blocks by their lifetimes has hardly a gap. But ops allocate their own results, and the
allocator takes the free block that fits best. So blocks are *held*: allocated before an op and freed after
it, they cover free memory except for holes of just the sizes that the op asks for. A hole of the right size
fits best, wherever it is. A hole between two held blocks is a third one, which is freed before the op. Held
blocks that change nothing are left out. Blocks of the small pool are left to the allocator.

Some offsets cannot be reached: holes of one size are taken in order of address, and no block of the large
pool covers a gap of up to 1 MiB. The rest of the step is then packed again, around what is there.

The two pools share nothing, so what counts is the sum of their peaks. Many gradients are small and alive at
the end of the step, when large blocks are few. Where it makes this sum smaller, gradients are *enlarged*:
copied into blocks of the large pool.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from stowplan.analyse.packing import PackedBlock, Packing, arena_bytes, best_fit, overlapping, pack
from stowplan.analyse.timeline import Doing
from stowplan.ir import Phase
from stowplan.ir.heap import BlockState, HeapSegment
from stowplan.ops.effects import UPDATE
from stowplan.plan.allocator.blocks import ADDRESS, ADDRESS_BITS
from stowplan.plan.allocator.caching import CachingAllocator
from stowplan.plan.allocator.requests import MemoryRequest, Requests, pools_at_most, requests_of
from stowplan.plan.allocator.settings import (
    OWN_SEGMENT,
    SEGMENT_STEP,
    SMALL_REQUEST,
    SMALLEST_BLOCK,
    AllocatorSettings,
)
from stowplan.plan.draft import Schedule
from stowplan.plan.explain.timeline import timeline_of_plan

_EFFORT = 6_000  # blocks that are placed when a step is packed again, for each size of the segment
_ENLARGED = 2**16  # bytes that a gradient has at least to be enlarged
_ROOMS = (0, 128, 64, 32, 16)  # parts of the segment that are added to it, until nothing lies beside it


@dataclass(frozen=True, slots=True)
class Held:
    """Blocks to allocate before a run of an op; the `holes` among them, by number, are freed before it."""

    sizes: tuple[int, ...] = ()
    holes: frozenset[int] = frozenset()

    def without(self, number: int) -> "Held":
        """All blocks but one."""
        sizes = self.sizes[:number] + self.sizes[number + 1 :]
        return Held(sizes, frozenset(hole - (hole > number) for hole in self.holes if hole != number))


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """What is held during each run, by its number.

    One segment of `segment_bytes` is for all large blocks: those that are there before the step, and
    `step_bytes` for those of the step. `runs` are those before which blocks can be held. Gradients that are
    `enlarged` have blocks of the large pool.
    """

    segment_bytes: int
    step_bytes: int
    by_run: Mapping[int, Held]
    runs: frozenset[int]
    enlarged: frozenset[str]

    @property
    def count(self) -> int:
        """How many blocks are held in an iteration, one after the other."""
        return sum(len(held.sizes) for held in self.by_run.values())

    def among(self, requests: Requests) -> Requests:
        """The requests of a step and of the blocks that are held."""
        fresh = 1 + max(block for block, _ in (*requests.before, *requests.iteration))
        iteration, runs = list[MemoryRequest](), list[int]()
        for run, part in enumerate(_parts(requests)):
            runs.append(len(iteration))
            held = self.by_run.get(run, Held())
            allocated = sum(nbytes > 0 for _, nbytes in part)  # before anything is freed
            iteration += (MemoryRequest(fresh + number, size) for number, size in enumerate(held.sizes))
            iteration += (MemoryRequest(fresh + hole, 0) for hole in sorted(held.holes))
            iteration += part[:allocated]
            iteration += (MemoryRequest(fresh + i, 0) for i in range(len(held.sizes)) if i not in held.holes)
            iteration += part[allocated:]
        return Requests(requests.before, tuple(iteration), tuple(runs))


def _parts(requests: Requests) -> Iterator[tuple[MemoryRequest, ...]]:
    """The requests of each run."""
    for first, last in pairwise((*requests.runs, len(requests.iteration))):
        yield requests.iteration[first:last]


def held_blocks_of(
    plan: Schedule, lasting: tuple[int, ...], settings: AllocatorSettings
) -> HeldBlocks | None:
    """Blocks to hold while a plan runs, so that its large blocks lie in one segment, as far as they fit.

    None if there are hardly any, or if the settings are not those by which blocks are held: an expandable
    segment or a limit of splits needs other rules.
    """
    if settings.expandable_segments or settings.max_split_bytes is not None:
        return None
    enlarged = _enlarged_of(plan, lasting, settings)
    step = _Step.of(plan, lasting, enlarged, settings)
    packing = pack(step.blocks)
    found: tuple[int, HeldBlocks] | None = None
    for part in _ROOMS:
        step_bytes = packing.arena_bytes + (packing.arena_bytes // part if part else 0)
        segment_bytes = -(-(sum(step.there) + step_bytes) // SEGMENT_STEP) * SEGMENT_STEP
        if segment_bytes < OWN_SEGMENT:
            return None
        allocator = CachingAllocator(settings)
        first = allocator.malloc(segment_bytes)
        allocator.free(first)
        for size in step.there:
            allocator.malloc(size)
        by_run = dict(_Steering(step, allocator, packing).runs())
        if found is None or allocator.reserved_bytes < found[0]:
            runs = frozenset(block.start for block in step.blocks) - step.bare
            found = allocator.reserved_bytes, HeldBlocks(segment_bytes, step_bytes, by_run, runs, enlarged)
        if found[0] <= segment_bytes:
            break
    return found[1] if found else None


def held_amid(plan: Schedule, planned: HeldBlocks, segments: Iterable[HeapSegment]) -> Mapping[int, Held]:
    """What to hold in each run if an allocator has these segments when the step begins.

    The step then lies around what others have there: workspaces of libraries, the optimizer's state.
    """
    settings = AllocatorSettings()
    known = [segment for segment in segments if segment.stream == segment.pool == 0]
    if all(segment.is_small for segment in known) or any(segment.is_expandable for segment in known):
        return {}
    step = _Step.of(plan, (), planned.enlarged, settings)
    allocator = CachingAllocator(settings)
    allocator.restore(known)
    return dict(_Steering(step, allocator, pack(step.blocks)).runs())


@dataclass(frozen=True, slots=True)
class _Step:
    """The large blocks of a step and of what is there before, and the runs before which no code can hold."""

    blocks: tuple[PackedBlock, ...]
    there: tuple[int, ...]
    runs: int
    bare: frozenset[int]

    @classmethod
    def of(
        cls, plan: Schedule, lasting: tuple[int, ...], enlarged: frozenset[str], settings: AllocatorSettings
    ) -> "_Step":
        requests, timeline = requests_of(plan, lasting, enlarged=enlarged), timeline_of_plan(plan)
        updates = {op.id for op in plan.graph.ops if op.type == UPDATE}
        computed = Doing.COMPUTE, Doing.RECOMPUTE
        runs = enumerate(timeline.runs)
        bare = frozenset(number for number, run in runs if run.doing not in computed or run.op in updates)
        there = (settings.block_bytes(nbytes) for _, nbytes in requests.before)
        return cls(
            tuple(_large_blocks(requests, settings)),
            tuple(size for size in there if size > SMALL_REQUEST),
            len(timeline.runs),
            bare,
        )


def _enlarged_of(plan: Schedule, lasting: tuple[int, ...], settings: AllocatorSettings) -> frozenset[str]:
    """The gradients from some size on with which the peaks of the two pools add up to least; or none."""
    small = {name: nbytes for name, nbytes in _small_gradients(plan) if nbytes >= _ENLARGED}
    choices = [frozenset(n for n in small if small[n] >= size) for size in {*small.values(), 2**63}]
    return min(
        sorted(choices, key=len),
        key=lambda chosen: pools_at_most(requests_of(plan, lasting, enlarged=chosen), settings),
    )


def _small_gradients(plan: Schedule) -> Iterator[tuple[str, int]]:
    """What one op of backward makes in the small pool and leaves to others, with its bytes."""
    graph, stays = plan.graph, timeline_of_plan(plan).stays
    places, times = Counter(stay.place for stay in stays), Counter(stay.tensor for stay in stays)
    held, written = set(map(graph.storage_of, graph.held)), Counter[str]()
    for op in graph.ops:
        owners = Counter(map(graph.storage_of, op.writes()))
        is_late = op.phase is Phase.BACKWARD
        written.update(name for name in op.writes() if graph.tensors[name].alias_of is None)
        written.update(name for name in owners if owners[name] > 1 or not is_late)  # and so are not alone
    for stay in stays:
        name = stay.tensor
        is_alone = places[stay.place] == times[name] == written[name] == 1
        if name in held and is_alone and 0 < stay.nbytes <= SMALL_REQUEST:
            yield name, stay.nbytes


def _large_blocks(requests: Requests, settings: AllocatorSettings) -> Iterator[PackedBlock]:
    """What a step allocates in the large pool, from run to run, in the order of its requests."""
    begun, found = dict[int, tuple[int, int]](), dict[tuple[int, int], PackedBlock]()
    for run, part in enumerate(_parts(requests)):
        for block, nbytes in part:
            if nbytes and (size := settings.block_bytes(nbytes)) > SMALL_REQUEST:
                begun[block] = run, size
                found[block, run] = PackedBlock(f"{block} {run}", size, run, run)
            elif not nbytes and block in begun:
                first, size = begun.pop(block)
                found[block, first] = PackedBlock(f"{block} {first}", size, first, run)
    yield from found.values()


@dataclass(frozen=True, slots=True)
class _Span:
    """Where a block lies, with its slack."""

    address: int
    size: int


class _Room:
    """The large segments of an allocator as one row of offsets, with walls between them."""

    def __init__(self, allocator: CachingAllocator, runs: int) -> None:
        self._offsets, self._addresses, self._ends = list[int](), list[int](), list[int]()
        self.standing: dict[PackedBlock, int] = {}  # offsets of what is there during the whole step
        self.free = _Span(0, 0)  # the largest free block
        self.size = 0
        for segment in allocator.segments():
            if not segment.is_small:
                self._offsets.append(self.size)
                self._addresses.append(segment.address)
                self._ends.append(segment.address + segment.nbytes)
                for address, nbytes, _, state in segment.blocks:
                    if state is not BlockState.FREE:
                        block = PackedBlock(f"at {address}", nbytes, 0, runs)
                        self.standing[block] = self.size + address - segment.address
                    elif nbytes > self.free.size:
                        self.free = _Span(address, nbytes)
                wall = PackedBlock(f"wall at {self._ends[-1]}", SMALLEST_BLOCK, 0, runs)
                self.standing[wall] = self.size + segment.nbytes
                self.size += segment.nbytes + SMALLEST_BLOCK

    def offset_of(self, address: int) -> int | None:
        """None if it is in a segment that was made since."""
        at = bisect_right(self._addresses, address) - 1
        if at < 0 or address >= self._ends[at]:
            return None
        return self._offsets[at] + address - self._addresses[at]

    def address_of(self, offset: int) -> int:
        at = bisect_right(self._offsets, offset) - 1
        return self._addresses[at] + offset - self._offsets[at]


class _Steering:
    """An allocator with the step's large blocks, which is brought to their offsets run by run."""

    def __init__(self, step: _Step, allocator: CachingAllocator, packing: Packing) -> None:
        self._step, self._allocator, self._room = step, allocator, _Room(allocator, step.runs)
        self._alive: dict[PackedBlock, _Span] = {}
        begin = self._room.offset_of(self._room.free.address)
        if begin is not None and packing.arena_bytes <= self._room.free.size:
            self._offsets, self._effort = {n: begin + at for n, at in packing.offsets.items()}, _EFFORT
        else:
            around, room = self._room.standing, self._room.size
            self._offsets, self._effort = _packed_around(step.blocks, around, room, _EFFORT)

    def runs(self) -> Iterator[tuple[int, Held]]:
        """What to hold in each run, where that is anything."""
        begun = dict[int, list[PackedBlock]]()
        for block in self._step.blocks:
            begun.setdefault(block.start, []).append(block)
        for run in range(self._step.runs):
            if wanted := begun.get(run):
                places = (self._room.address_of(self._offsets[block.id]) for block in wanted)
                targets = [_Span(at, block.nbytes) for at, block in zip(places, wanted, strict=True)]
                held = Held() if run in self._step.bare else self._held_for(wanted, targets)
                if held.sizes:
                    yield run, held
                spans = self._spans_with(held, wanted, keep=True)
                assert spans is not None, "a block that is kept may take a new segment"
                self._alive |= zip(wanted, spans, strict=True)
                if spans != targets:
                    self._pack_again(run)
            for block in [block for block in self._alive if block.end == run]:
                self._allocator.free(self._alive.pop(block).address)

    def _held_for(self, wanted: Sequence[PackedBlock], targets: Sequence[_Span]) -> Held:
        """As few blocks as bring the wanted ones to the targets, or to where the allocator takes them."""
        if self._spans_with(Held(), wanted) == targets:
            return Held()
        held = self._covering(targets)
        spans = held and self._spans_with(held, wanted)
        if held is None or spans is None:
            return Held()
        for number in reversed(range(len(held.sizes))):
            fewer = held.without(number)
            if self._spans_with(fewer, wanted) == spans:
                held = fewer
        return held

    def _covering(self, targets: Sequence[_Span]) -> Held | None:
        """Blocks that leave just the targets free; None if one of them is not, or not to be reached.

        Free blocks are covered from the smallest on, in the order in which the allocator takes them.
        """
        sizes, holes = list[int](), set[int]()
        for free in self._free():
            at, end = free.address, free.address + free.size
            for target in sorted(targets, key=lambda target: target.address):
                if at <= target.address and target.address + target.size <= end:
                    if 0 < target.address - at <= SMALL_REQUEST:
                        return None
                    if at < target.address:
                        sizes.append(target.address - at)
                    holes.add(len(sizes))
                    sizes.append(target.size)
                    at = target.address + target.size
            if end - at > SMALL_REQUEST:
                sizes.append(end - at)
        return Held(tuple(sizes), frozenset(holes)) if len(holes) == len(targets) else None

    def _free(self) -> list[_Span]:
        """The free blocks of the large pool, by size."""
        keys = self._allocator.heaps[0][1].free.get(0, ())
        return [_Span(key & ADDRESS, key >> ADDRESS_BITS) for key in keys]

    def _spans_with(
        self, held: Held, wanted: Sequence[PackedBlock], *, keep: bool = False
    ) -> list[_Span] | None:
        """Where blocks come to lie; None if that takes a new segment. They are freed again unless kept."""
        extra, spans, fits = list[int](), list[_Span](), True
        for size in held.sizes:
            fits = fits and self._has_room(size)
            if fits:
                extra.append(self._allocator.malloc(size))
        if fits:
            for hole in held.holes:
                self._allocator.free(extra[hole])
        for block in wanted:
            fits = fits and (keep or self._has_room(block.nbytes))
            if fits:
                address = self._allocator.malloc(block.nbytes)
                spans.append(_Span(address, self._allocator.block_at[address].size))
        for number, address in enumerate(extra):
            if len(extra) < len(held.sizes) or number not in held.holes:
                self._allocator.free(address)
        if not keep:
            for span in spans:
                self._allocator.free(span.address)
        return spans if fits else None

    def _has_room(self, size: int) -> bool:
        keys = self._allocator.heaps[0][1].free.get(0) or (0,)
        return keys[-1] >> ADDRESS_BITS >= size

    def _pack_again(self, run: int) -> None:
        """Give the blocks of later runs other offsets if those that are alive lie in their way."""
        around = dict(self._room.standing)
        for block, span in self._alive.items():
            offset = self._room.offset_of(span.address)
            if offset is not None:
                around[PackedBlock(block.id, span.size, run, block.end)] = offset
        later = [block for block in self._step.blocks if block.start > run]
        lying = {block.id: offset for block, offset in around.items()}
        if overlapping([*around, *later], {**self._offsets, **lying}) is None:
            return
        offsets, self._effort = _packed_around(later, around, self._room.size, self._effort)
        self._offsets |= offsets


def _packed_around(
    blocks: Sequence[PackedBlock], around: Mapping[PackedBlock, int], room: int, effort: int
) -> tuple[dict[str, int], int]:
    """Offsets of blocks between those that lie `around` them, and the effort that is left: blocks to place.

    Orders are tried until all lie within the room. What lies beyond it is brought forward, and what does not
    help is undone.
    """
    random, top = Random(0), 2**63
    for key in _ORDERS:
        first = sorted(blocks, key=key)
        attempt = best_fit(first, around)
        if arena_bytes(blocks, attempt) < top:
            order, offsets, top = first, attempt, arena_bytes(blocks, attempt)
    while top > room and effort > 0:
        effort -= len(blocks)
        changed = order.copy()
        beyond = [at for at, block in enumerate(order) if offsets[block.id] + block.nbytes > room]
        at = random.choice(beyond)
        changed.insert(random.randrange(at + 1), changed.pop(at))
        while random.random() < 0.5:
            changed.insert(random.randrange(len(blocks)), changed.pop(random.randrange(len(blocks))))
        attempt = best_fit(changed, around)
        if arena_bytes(blocks, attempt) <= top:
            order, offsets, top = changed, attempt, arena_bytes(blocks, attempt)
    return offsets, effort


def _largest_first(block: PackedBlock) -> tuple[int, ...]:
    return -block.nbytes, -block.lifetime, block.start


def _most_first(block: PackedBlock) -> tuple[int, ...]:
    return -block.nbytes * block.lifetime, block.start


def _earliest_first(block: PackedBlock) -> tuple[int, ...]:
    return block.start, -block.nbytes


_ORDERS = _largest_first, _most_first, _earliest_first
