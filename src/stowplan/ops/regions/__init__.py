"""Region rules: to produce this rectangle of an op's output, these rectangles of its inputs are needed."""

from collections.abc import Sequence

from stowplan.geometry import Rect
from stowplan.ops.regions import contractions, pointwise, reductions, views, windowed
from stowplan.ops.regions.relation import DimKind, Need, Partial, Reduction, Regions, Relation
from stowplan.ops.regions.rules import regions_of
from stowplan.ops.table import Site

__all__ = [
    "FAMILIES",
    "DimKind",
    "Need",
    "Partial",
    "Reduction",
    "Regions",
    "Relation",
    "pull",
    "push",
    "regions_of",
]

FAMILIES = (contractions, pointwise, reductions, views, windowed)
"""The modules whose rules are in the table."""


def pull(site: Site, outputs: Rect, output: int = 0) -> tuple[Rect | None, ...]:
    """Per input, the rect needed to produce `outputs` of the op's output number `output`.

    None where nothing of an input is needed. A rect may reach past its input: that part is padding.
    """
    return regions_of(site).outputs[output].pull(outputs)


def push(site: Site, inputs: Sequence[Rect | None], output: int = 0) -> Rect | None:
    """A rect of output number `output` that these parts of the inputs suffice to produce."""
    return regions_of(site).outputs[output].push(inputs)
