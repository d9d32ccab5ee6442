"""Lanes: strips of the arena that host one block after another, and smaller blocks where they would idle.

Blocks of one size need as many strips as are alive at once, and no more: the classic colouring of intervals.
Large steps have few sizes, many times each. Idle parts are kept as slots, rectangles of time and height; each
block takes the lowest slot found that holds its life, and what it leaves over is cut into new slots. Time
grows about like n log n, which makes this the way for a hundred thousand blocks.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stowplan.analyse.packing.blocks import Block

_LOOKED_AT = 8  # slots of one height class tried per block, those that begin last before its life


class _Slot(NamedTuple):
    """Free from op position `start` until before `end`, `height` bytes from `offset`."""

    start: int
    end: int
    height: int
    offset: int


def lanes(blocks: Sequence[Block]) -> dict[str, int]:
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


def _rests(slot: _Slot, block: Block) -> Iterator[_Slot]:
    """What a block leaves of a slot. Where its like fits above, the slot is cut lengthwise, else across."""
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

    def take(self, block: Block) -> _Slot | None:
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
