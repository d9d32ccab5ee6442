"""Results that kernels leave in storages larger than what they span: they hold all of it while they live.

Some ops allocate as much as their operands take, compute in there, and shrink the result without giving
memory back: in eager a loss of one number then holds a megabyte. A plan copies such a result out at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch._ops import OpOverload

from stowplan.capture.cells import Cell
from stowplan.capture.schema import bound_arguments, leaves

aten = torch.ops.aten

# Their result is in a storage for their operands broadcast together, if it is not larger by itself.
_LIKE_OPERANDS = frozenset(
    (
        aten.mse_loss.default,
        aten.smooth_l1_loss.default,
        aten.binary_cross_entropy.default,
        aten.soft_margin_loss.default,
        aten.im2col.default,
        aten.col2im.default,
    )
)


def is_copied_out(target: OpOverload, result: Cell, storage_bytes: int) -> bool:
    """Whether the one result of an op is worth a copy, so that its storage may go."""
    return target in _LIKE_OPERANDS and storage_bytes > result.extent_bytes()


def extra_bytes(
    target: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], results: Sequence[Cell | None]
) -> Iterator[tuple[Cell, int]]:
    """Results in larger storages than they span, with the bytes by which these are larger."""
    for made in results if target in _LIKE_OPERANDS else ():
        operands = [leaf.shape for leaf in leaves(tuple(args)) if isinstance(leaf, Cell)]
        if made is not None:
            nbytes = prod(np.broadcast_shapes(*operands)) * made.dtype.itemsize
            yield made, max(0, nbytes - made.extent_bytes())
    if target is aten._embedding_bag.default:  # positions of bags are counted with one that ends the last
        _, positions, sizes, _ = results
        if positions is not None and 0 not in positions.shape:
            yield positions, positions.dtype.itemsize
        if sizes is not None and bound_arguments(target, args, kwargs)["include_last_offset"]:
            yield sizes, sizes.dtype.itemsize
