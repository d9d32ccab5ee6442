"""Search: best fit over many orders, because a block that came too late for its hole should come earlier."""

from collections.abc import Sequence
from random import Random

from stowplan.analyse.packing.best_fit import best_fit
from stowplan.analyse.packing.blocks import Block, Offsets, arena_bytes

_ORDERS, _PLACEMENTS = 300, 40_000  # bound the effort, to about a second


def search(blocks: Sequence[Block], target: int) -> Offsets:
    """Start with the largest first; until the arena is down to `target`, bring a block that tops it forward.

    Moves that do not enlarge the arena are kept. The same blocks always give the same offsets.
    """
    random = Random(0)
    order = sorted(blocks, key=lambda block: (-block.nbytes, -block.lifetime, block.start, block.id))
    offsets = best_fit(order)
    arena = arena_bytes(blocks, offsets)
    for _ in range(min(_ORDERS, _PLACEMENTS // max(1, len(blocks)))):
        if arena <= target:
            break
        changed = _brought_forward(order, _one_on_top(order, offsets, arena, random), random)
        attempt = best_fit(changed)
        if arena_bytes(blocks, attempt) <= arena:
            order, offsets, arena = changed, attempt, arena_bytes(blocks, attempt)
    return offsets


def _one_on_top(order: Sequence[Block], offsets: Offsets, arena: int, random: Random) -> int:
    """The place in the order of a block that reaches the arena's end."""
    topmost = [i for i, block in enumerate(order) if offsets[block.id] + block.nbytes == arena]
    return random.choice(topmost)


def _brought_forward(order: Sequence[Block], place: int, random: Random) -> list[Block]:
    earlier = random.randrange(place) if place else 0
    return [*order[:earlier], order[place], *order[earlier:place], *order[place + 1 :]]
