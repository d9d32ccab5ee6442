"""Best fit: each block in turn goes into the smallest hole that is free for its whole life and large enough.

Close to optimal when the largest come first, but every placement looks at all blocks placed before: for some
thousands of blocks.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stowplan.analyse.packing.blocks import Block

_START, _END, _LOW, _HIGH = range(4)


def best_fit(blocks: Sequence[Block]) -> dict[str, int]:
    """Offsets of the blocks, placed in the given order."""
    placed = np.empty((4, len(blocks)), dtype=np.int64)  # columns sorted by _LOW
    offsets = {}
    for count, block in enumerate(blocks):
        offset = _lowest_best_hole(placed[:, :count], block)
        column = int(np.searchsorted(placed[_LOW, :count], offset))
        placed[:, column + 1 : count + 1] = placed[:, column:count]
        placed[:, column] = (block.start, block.end, offset, offset + block.nbytes)
        offsets[block.id] = offset
    return offsets


def _lowest_best_hole(placed: NDArray[np.int64], block: Block) -> int:
    meets = (placed[_START] <= block.end) & (placed[_END] >= block.start)
    lows = placed[_LOW, meets]
    if not len(lows):
        return 0
    floors = np.zeros(len(lows) + 1, dtype=np.int64)  # where the hole below each neighbour begins
    np.maximum.accumulate(placed[_HIGH, meets], out=floors[1:])
    holes = lows - floors[:-1]
    fitting = np.flatnonzero(holes >= block.nbytes)
    return int(floors[fitting[np.argmin(holes[fitting])]] if len(fitting) else floors[-1])
