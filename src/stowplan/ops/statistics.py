"""Statistics: what an op has to know of all its input before it can make any part of its output.

A norm over places, in training over samples too, and pooling over all places are exact on parts once these
few numbers are known: they are gathered from parts that do not overlap, and merged.
"""

from dataclasses import dataclass

from stowplan.ops.regions import Partial, Relation, regions_of
from stowplan.ops.table import Site, shape_of

BATCH_NORMS = frozenset(
    {
        "aten._native_batch_norm_legit_functional.default",
        "aten._native_batch_norm_legit.no_stats",
        "aten.native_batch_norm.default",
    }
)
GROUP_NORM = "aten.native_group_norm.default"
_TOTALS = frozenset({"aten.mean.dim", "aten.sum.dim_IntList", "aten.mean.default", "aten.sum.default"})
_TAKERS = BATCH_NORMS | _TOTALS | {GROUP_NORM}


@dataclass(frozen=True, slots=True)
class Statistic:
    """Of which dims of the first input what is gathered.

    `after` is what a part of the output needs once that is known; None where what is known is the output.
    """

    partial: Partial
    dims: tuple[int, ...]
    after: Relation | None

    @property
    def is_output(self) -> bool:
        """Whether the op's output is the statistic itself: a sum or a mean."""
        return self.after is None


def statistic_of(site: Site) -> Statistic | None:
    """The statistic that an op takes; None if it takes none, or none that can be merged of parts."""
    kind = site.op.type
    if kind not in _TAKERS or not site.inputs or not site.outputs:
        return None
    reduction = regions_of(site).outputs[0].reduction
    if reduction is None:
        return None
    dims = tuple(dim for dim in reduction.dims[0] if dim is not None)
    if kind == GROUP_NORM:
        dims = tuple(range(1, len(shape_of(site.inputs[0]))))
    return Statistic(reduction.partial, dims, reduction.after)
