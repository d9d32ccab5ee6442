"""Statistics: numbers over the whole input that an op needs before it can make any part of its output.

Norms over positions (in training also over samples) and pooling over all positions are exact on parts once
these numbers are known. They are computed on disjoint parts and merged.
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
    """The statistic of an op, and the dims of the first input it covers.

    `after` is what a part of the output needs once the statistic is known; None where the statistic is the
    output.
    """

    partial: Partial
    dims: tuple[int, ...]
    after: Relation | None

    @property
    def is_output(self) -> bool:
        """Whether the op's output is the statistic itself: a sum or a mean."""
        return self.after is None


def statistic_of(site: Site) -> Statistic | None:
    """The statistic of an op; None if it has none, or none that can be merged from parts."""
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
