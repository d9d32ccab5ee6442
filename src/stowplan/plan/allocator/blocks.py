"""Blocks of the allocator's model, and the lists that they are found in. Slotted: there are many."""

from typing import NamedTuple

FREE, ALLOCATED, WAITING, UNMAPPED = range(4)
ADDRESS_BITS = 96
ADDRESS = (1 << ADDRESS_BITS) - 1
"""A key of a free list is `size << ADDRESS_BITS | address`, so that keys sort by size, then by address."""


class Block:
    """A piece of a segment, between its neighbours.

    `uses` are the other streams that used it, `events` counts those it waits for, `born` is when it became
    free.
    """

    __slots__ = (
        "address",
        "born",
        "events",
        "heap",
        "next",
        "prev",
        "requested",
        "size",
        "state",
        "stream",
        "uses",
    )

    def __init__(self, address: int, size: int, stream: int, heap: "Heap", state: int) -> None:
        self.address, self.size, self.stream, self.heap, self.state = address, size, stream, heap, state
        self.prev: Block | None = None
        self.next: Block | None = None
        self.requested = 0
        self.uses: set[int] | None = None
        self.events = 0
        self.born = 0


class Heap:
    """The small or the large blocks of one pool that can be used: free ones by key, unmapped ones by address.

    There is a sorted list for each stream. `searches` counts requests, as the clock of garbage collection.
    """

    __slots__ = ("free", "is_small", "pool", "searches", "unmapped")

    def __init__(self, pool: int, *, is_small: bool) -> None:
        self.pool, self.is_small = pool, is_small
        self.free: dict[int, list[int]] = {}
        self.unmapped: dict[int, list[int]] = {}
        self.searches = 0


def heaps_of(pool: int) -> tuple[Heap, Heap]:
    """The small and the large heap of a new pool."""
    return Heap(pool, is_small=True), Heap(pool, is_small=False)


class Range(NamedTuple):
    """A segment, or the address space of an expandable one."""

    address: int
    stream: int
    heap: Heap
