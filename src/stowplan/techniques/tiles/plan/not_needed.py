"""Ops that are not needed in backward: products whose results no gradient reads.

The gradients of a convolution or a matrix product do not read its result. If only sums and views lie between
the product and the segment's end, no other gradient reads it either, and backward need not recompute it.
"""

from stowplan.ops.tiling import RESHAPES
from stowplan.techniques.tiles.plan.segment import Segment

PRODUCTS = frozenset({"aten.convolution.default", "aten.mm.default", "aten.addmm.default"})
_LINEAR = frozenset(
    {
        *RESHAPES,
        *(f"aten.{name}.Tensor" for name in ("add", "sub", "slice", "split")),
        *(f"aten.{name}.default" for name in ("permute", "t", "cat", "clone", "alias", "expand")),
        "aten.transpose.int",
        "aten.split_with_sizes.default",
    }
)


def not_needed_in_backward(segment: Segment) -> frozenset[str]:
    """The ids of the products whose results no gradient of the segment reads."""
    if segment.loss is not None:
        return frozenset()
    needed, idle = set[str](), set[str]()
    for op in reversed(segment.ops):
        is_needed = not needed.isdisjoint(op.writes())
        if is_needed or op.type not in _LINEAR:
            needed.update(op.reads())
        if not is_needed and op.type in PRODUCTS:
            idle.add(op.id)
    return frozenset(idle)
