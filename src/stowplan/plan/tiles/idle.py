"""Which ops of a segment need not be run again to be differentiated: products whose values nobody looks at.

The gradients of a convolution or a matrix product do not read its result. Where that only goes through sums
and views to the segment's end, running the product again would be work for nothing.
"""

from stowplan.ops.tiling import RESHAPES
from stowplan.plan.tiles.segment import Segment

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


def idle_ops(segment: Segment) -> frozenset[str]:
    """The products, by op, whose values no gradient of the segment needs."""
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
