"""Block: bytes that are needed from one op to another. Packing gives each an offset in one arena."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

Offsets: TypeAlias = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Block:
    """`nbytes` that exist from op position `start` to op position `end`, both included."""

    id: str
    nbytes: int
    start: int
    end: int

    @property
    def lifetime(self) -> int:
        """How many ops it lives through."""
        return self.end - self.start + 1


def max_live_bytes(blocks: Iterable[Block]) -> int:
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


def arena_bytes(blocks: Iterable[Block], offsets: Offsets) -> int:
    """How large an arena these offsets need."""
    return max((offsets[block.id] + block.nbytes for block in blocks), default=0)
