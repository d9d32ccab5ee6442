"""Packing: offsets in one arena for all blocks of a step, and a check that no two live blocks overlap.

Two packers compete. Best fit puts each block into the smallest hole that is free for its whole life. It is
close to optimal when the largest blocks come first, and a search over orders of the largest blocks usually
closes the gap. It compares each block with all placed blocks, which suits some thousands of blocks.

Lanes are strips of the arena that host one block after another: blocks of one size need as many strips as are
alive at once (interval colouring), and large steps have few sizes. The idle parts of a strip are slots,
rectangles of time and height; a block takes the lowest slot that holds its life, and the rest becomes new
slots. This takes about n log n time, for a hundred thousand blocks.

`overlapping` checks a packing and shares no code with the packers.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stowplan.errors import BadUse

Offsets: TypeAlias = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PackedBlock:
    """`nbytes` that exist from op position `start` to op position `end`, both included."""

    id: str
    nbytes: int
    start: int
    end: int

    @property
    def lifetime(self) -> int:
        """How many ops it lives through."""
        return self.end - self.start + 1


def max_live_bytes(blocks: Iterable[PackedBlock]) -> int:
    """The most bytes alive at one op: no arena can be smaller."""
    change: dict[int, int] = {}
    for block in blocks:
        change[block.start] = change.get(block.start, 0) + block.nbytes
        change[block.end + 1] = change.get(block.end + 1, 0) - block.nbytes
    live = most = 0
    for position in sorted(change):
        live += change[position]
        most = max(most, live)
    return most


def arena_bytes(blocks: Iterable[PackedBlock], offsets: Offsets) -> int:
    """How large an arena these offsets need."""
    return max((offsets[block.id] + block.nbytes for block in blocks), default=0)


_START, _END, _LOW, _HIGH = range(4)


def best_fit(
    blocks: Sequence[PackedBlock], around: Mapping[PackedBlock, int] = MappingProxyType({})
) -> dict[str, int]:
    """Offsets of the blocks, placed in the given order between those that lie `around` them already."""
    placed = np.empty((4, len(around) + len(blocks)), dtype=np.int64)  # columns sorted by _LOW
    for column, (block, offset) in enumerate(sorted(around.items(), key=lambda item: item[1])):
        placed[:, column] = (block.start, block.end, offset, offset + block.nbytes)
    offsets = {block.id: offset for block, offset in around.items()}
    for count, block in enumerate(blocks, start=len(around)):
        offset = _lowest_best_hole(placed[:, :count], block)
        column = int(np.searchsorted(placed[_LOW, :count], offset))
        placed[:, column + 1 : count + 1] = placed[:, column:count]
        placed[:, column] = (block.start, block.end, offset, offset + block.nbytes)
        offsets[block.id] = offset
    return offsets


def _lowest_best_hole(placed: NDArray[np.int64], block: PackedBlock) -> int:
    meets = (placed[_START] <= block.end) & (placed[_END] >= block.start)
    lows = placed[_LOW, meets]
    if not len(lows):
        return 0
    floors = np.zeros(len(lows) + 1, dtype=np.int64)  # where the hole below each neighbour begins
    np.maximum.accumulate(placed[_HIGH, meets], out=floors[1:])
    holes = lows - floors[:-1]
    fitting = np.flatnonzero(holes >= block.nbytes)
    return int(floors[fitting[np.argmin(holes[fitting])]] if len(fitting) else floors[-1])


_SHARES = 2_000, 20_000, 2**40  # blocks from this part of the arena on are large, first these, then those
_ORDERED = 600  # of the largest at most
_ORDERS, _COMPARISONS = 1_000, 5_000_000  # bound the effort for each share, to about a second
_RESTART = 150  # orders after which the search begins anew
_COMPLETED = 8  # orders of the large blocks that are completed with the small ones


def search(blocks: Sequence[PackedBlock], target: int) -> Offsets:
    """Best fit with the largest first; if the arena exceeds `target`, other orders of the large blocks.

    The small blocks then fill the gaps. The same blocks always give the same offsets.
    """
    order = sorted(blocks, key=lambda block: (-block.nbytes, -block.lifetime, block.start, block.id))
    offsets = best_fit(order)
    arena = arena_bytes(blocks, offsets)
    if arena <= target:
        return offsets
    counts = (sum(share * block.nbytes >= target for block in order[:_ORDERED]) for share in _SHARES)
    for count in filter(None, dict.fromkeys(counts)):
        large, small = order[:count], order[count:]
        for lows in islice(_arrangements(large, target), _COMPLETED):
            attempt = best_fit(small, dict(zip(large, lows, strict=True)))
            if arena_bytes(blocks, attempt) < arena:
                offsets, arena = attempt, arena_bytes(blocks, attempt)
            if arena <= target:
                return offsets
    return offsets


def _arrangements(blocks: Sequence[PackedBlock], target: int) -> Iterator[list[int]]:
    """Offsets of blocks placed by first fit, for each order within `target`; then the smallest, if none is.

    A block that reaches beyond `target` is brought forward in the order, and some others are moved, most of
    them large. What does not enlarge the arena is kept.
    """
    random, met, count = Random(0), _met_by(blocks), len(blocks)
    smallest: tuple[int, list[int]] = 2**63, []
    arena, order, lows = smallest[0], list(range(count)), list[int]()
    changed = order
    for number in range(min(_ORDERS, _COMPARISONS // sum(map(len, met)))):
        if number % _RESTART == 0:
            arena, changed = 2**63, list(range(count))
        attempt = _first_fit(blocks, met, changed)
        top = max(low + block.nbytes for low, block in zip(attempt, blocks, strict=True))
        smallest = min(smallest, (top, attempt))
        if top <= target:
            yield attempt
        if top <= arena:
            arena, order, lows = top, changed, attempt
        changed = order.copy()
        beyond = [at for at, i in enumerate(order) if lows[i] + blocks[i].nbytes > target]
        if beyond:
            place = random.choice(beyond)
            changed.insert(random.randrange(place + 1), changed.pop(place))
        while random.random() < 0.75:
            block = changed.pop(int(count * random.random() ** 3))
            changed.insert(int(count * random.random() ** 3), block)
    if smallest[1] and smallest[0] > target:
        yield smallest[1]


def _met_by(blocks: Sequence[PackedBlock]) -> list[list[int]]:
    """By number of a block the numbers of those that are alive together with it."""
    starts = np.array([block.start for block in blocks])
    ends = np.array([block.end for block in blocks])
    together = (starts[:, None] <= ends) & (starts <= ends[:, None])
    return [np.flatnonzero(row).tolist() for row in together]


def _first_fit(
    blocks: Sequence[PackedBlock], met: Sequence[Sequence[int]], order: Iterable[int]
) -> list[int]:
    """The lowest offset for each block, in the given order."""
    spans: list[tuple[int, int] | None] = [None] * len(blocks)
    for i in order:
        nbytes, floor = blocks[i].nbytes, 0
        for low, high in sorted([span for j in met[i] if (span := spans[j]) is not None]):
            if low - floor >= nbytes:
                break
            if high > floor:
                floor = high
        spans[i] = floor, floor + nbytes
    return [span[0] for span in spans if span is not None]


_LOOKED_AT = 8  # slots of one height class tried per block, those that begin last before its life


class _Slot(NamedTuple):
    """Free from op position `start` until before `end`, `height` bytes from `offset`."""

    start: int
    end: int
    height: int
    offset: int


def lanes(blocks: Sequence[PackedBlock]) -> dict[str, int]:
    """Offsets of the blocks, the largest placed first, those of one size as they come alive."""
    if not blocks:
        return {}
    begin, end = min(block.start for block in blocks), max(block.end for block in blocks) + 1
    slots, top, offsets = _Slots(), 0, {}
    for block in sorted(blocks, key=lambda block: (-block.nbytes, block.start, -block.end, block.id)):
        slot = slots.take(block)
        if slot is None:
            slot = _Slot(begin, end, block.nbytes, top)
            top += block.nbytes
        offsets[block.id] = slot.offset
        for rest in _rests(slot, block):
            slots.add(rest)
    return offsets


def _rests(slot: _Slot, block: PackedBlock) -> Iterator[_Slot]:
    """The free rests of a slot around a block: cut lengthwise if an equal block fits above, else across."""
    above, offset = slot.height - block.nbytes, slot.offset + block.nbytes
    lengthwise = above >= block.nbytes
    height = block.nbytes if lengthwise else slot.height
    yield _Slot(slot.start, block.start, height, slot.offset)
    yield _Slot(block.end + 1, slot.end, height, slot.offset)
    if lengthwise:
        yield _Slot(slot.start, slot.end, above, offset)
    else:
        yield _Slot(block.start, block.end + 1, above, offset)


class _Slots:
    """Free slots by class of height, eight classes to a doubling; in a class by the time they begin."""

    def __init__(self) -> None:
        self._by_class: dict[int, list[_Slot]] = {}
        self._classes: list[int] = []  # sorted

    def add(self, slot: _Slot) -> None:
        if slot.start >= slot.end or not slot.height:
            return
        height_class = _class_of(slot.height)
        if height_class not in self._by_class:
            self._by_class[height_class] = []
            insort(self._classes, height_class)
        insort(self._by_class[height_class], slot)

    def take(self, block: PackedBlock) -> _Slot | None:
        """A slot from the lowest class that holds the block, or None."""
        for at in range(bisect_left(self._classes, _class_of(block.nbytes)), len(self._classes)):
            slots = self._by_class[self._classes[at]]
            last = bisect_right(slots, (block.start + 1,))
            fitting = [
                (slots[i].height, i)
                for i in range(max(0, last - _LOOKED_AT), last)
                if slots[i].end > block.end and slots[i].height >= block.nbytes
            ]
            if fitting:
                return slots.pop(min(fitting)[1])
        return None


def _class_of(height: int) -> int:
    """Grows with the height: its binary digits' count and the three digits after the first."""
    digits = height.bit_length()
    return digits * 8 + ((height << 3 >> digits - 1) & 7 if digits else 0)


_SEARCHED = 10_000  # blocks; best fit looks at all pairs, which takes seconds beyond this


@dataclass(frozen=True, slots=True)
class Packing:
    """Where each block lies. `max_live_bytes` is what no arena can go below."""

    offsets: Offsets
    arena_bytes: int
    max_live_bytes: int

    @property
    def gap(self) -> float:
        """How much larger the arena is than it must be, as a fraction: 0.01 is one per cent."""
        return self.arena_bytes / self.max_live_bytes - 1 if self.max_live_bytes else 0.0


def pack(blocks: Sequence[PackedBlock]) -> Packing:
    """Offsets for all blocks. Those alive from the first op to the last lie at the bottom, out of the way."""
    _check(blocks)
    first, last = min((b.start for b in blocks), default=0), max((b.end for b in blocks), default=0)
    standing = [block for block in blocks if (block.start, block.end) == (first, last)]
    moving = [block for block in blocks if (block.start, block.end) != (first, last)]
    offsets, base = {}, 0
    for block in standing:
        offsets[block.id] = base
        base += block.nbytes
    offsets |= {name: base + offset for name, offset in _placed(moving).items()}
    return Packing(offsets, arena_bytes(blocks, offsets), max_live_bytes(blocks))


def _placed(blocks: Sequence[PackedBlock]) -> Offsets:
    if len(blocks) > _SEARCHED:
        return lanes(blocks)
    target = max_live_bytes(blocks)
    found = search(blocks, target)
    if arena_bytes(blocks, found) == target:
        return found
    return min(found, lanes(blocks), key=lambda offsets: arena_bytes(blocks, offsets))


def _check(blocks: Sequence[PackedBlock]) -> None:
    for block in blocks:
        if block.nbytes < 0 or block.start > block.end:
            raise BadUse(f"{block} has no size or no life")
    if len({block.id for block in blocks}) < len(blocks):
        raise BadUse("two blocks have the same id; offsets are given by id")
    if sum(block.nbytes for block in blocks) >= 2**63:
        raise BadUse("the blocks together do not fit 63-bit addresses")


_RUN = 512


class _Claim(NamedTuple):
    """The bytes from `low` until before `high`, taken by a block."""

    low: int
    high: int
    id: str


def overlapping(blocks: Sequence[PackedBlock], offsets: Offsets) -> tuple[str, str] | None:
    """Two blocks that share a byte while both are alive, or None if there are none.

    Sweeps over time with the claims of that time sorted by address, so only neighbours need to be compared.
    """
    for block in blocks:
        if offsets.get(block.id, -1) < 0:
            raise BadUse(f"block {block.id!r} has no offset, or one before the arena begins")
    claims = _Claims()
    sized = [block for block in blocks if block.nbytes]
    births = sorted(sized, key=lambda block: block.start)
    deaths = sorted(sized, key=lambda block: block.end)
    dead = 0
    for block in births:
        while deaths[dead].end < block.start:
            claims.remove(_claim_of(deaths[dead], offsets))
            dead += 1
        rival = claims.add(_claim_of(block, offsets))
        if rival is not None:
            return rival, block.id
    return None


def _claim_of(block: PackedBlock, offsets: Offsets) -> _Claim:
    return _Claim(offsets[block.id], offsets[block.id] + block.nbytes, block.id)


class _Claims:
    """Disjoint claims in order of address, in short runs so that a change moves few of them."""

    def __init__(self) -> None:
        self._runs: list[list[_Claim]] = [[]]
        self._heads: list[_Claim] = [_Claim(-1, -1, "")]  # no later than each run's first claim

    def add(self, claim: _Claim) -> str | None:
        """File the claim, unless it meets another, whose id is returned."""
        at = self._run_of(claim)
        run = self._runs[at]
        place = bisect_left(run, claim)
        for neighbour in (*run[max(0, place - 1) : place + 1], *self._ends_beside(at)):
            if neighbour.low < claim.high and claim.low < neighbour.high:
                return neighbour.id
        run.insert(place, claim)
        if len(run) > 2 * _RUN:
            self._runs.insert(at + 1, run[_RUN:])
            self._heads.insert(at + 1, run[_RUN])
            del run[_RUN:]
        return None

    def remove(self, claim: _Claim) -> None:
        at = self._run_of(claim)
        run = self._runs[at]
        del run[bisect_left(run, claim)]
        if not run and at:
            del self._runs[at], self._heads[at]

    def _run_of(self, claim: _Claim) -> int:
        return bisect_right(self._heads, claim) - 1

    def _ends_beside(self, at: int) -> list[_Claim]:
        """The last claim of the run before and the first of the run after."""
        before = self._runs[at - 1][-1:] if at else []
        after = self._runs[at + 1][:1] if at + 1 < len(self._runs) else []
        return before + after
