"""Pack blocks into one arena: no two that live together overlap, and it is as small as can be found."""

from collections.abc import Sequence
from dataclasses import dataclass

from stowplan.analyse.packing.blocks import Block, Offsets, arena_bytes, max_live_bytes
from stowplan.analyse.packing.lanes import lanes
from stowplan.analyse.packing.search import search
from stowplan.errors import BadUse

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


def pack(blocks: Sequence[Block]) -> Packing:
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


def _placed(blocks: Sequence[Block]) -> Offsets:
    if len(blocks) > _SEARCHED:
        return lanes(blocks)
    target = max_live_bytes(blocks)
    found = search(blocks, target)
    if arena_bytes(blocks, found) == target:
        return found
    return min(found, lanes(blocks), key=lambda offsets: arena_bytes(blocks, offsets))


def _check(blocks: Sequence[Block]) -> None:
    for block in blocks:
        if block.nbytes < 0 or block.start > block.end:
            raise BadUse(f"{block} has no size or no life")
    if len({block.id for block in blocks}) < len(blocks):
        raise BadUse("two blocks have the same id; offsets are given by id")
    if sum(block.nbytes for block in blocks) >= 2**63:
        raise BadUse("the blocks together do not fit 63-bit addresses")
