"""Norms after products: the statistics of such a norm follow from the input of the product.

A convolution of single places is a matrix product, y = W a + b at every place: the mean of y is that of a
times W, plus b, and its variances are the diagonal of W cov(a) Wᵀ. Where a has fewer channels than y, its
covariances are less work to gather than y is to make, and their gradients reach a without the product.
"""

from dataclasses import dataclass

from stowplan.ir import DType, Graph, Op
from stowplan.ops.effects import macs_of
from stowplan.ops.statistics import BATCH_NORMS
from stowplan.ops.table import elements_of, shape_of, site_of
from stowplan.ops.windows import windows_of
from stowplan.techniques.tiles.plan.segment import Segment

_CONVOLUTION = "aten.convolution.default"
_EXACT = (DType.FLOAT32, DType.FLOAT64)  # what is narrower is rounded when the product is made, which counts


@dataclass(frozen=True, slots=True)
class Product:
    """An op that multiplies the vector at each position of `source` by `weight`, in steps of `strides`."""

    op: Op
    strides: tuple[int, ...]
    work: float  # of gathering covariances, against making the product

    @property
    def source(self) -> str:
        return self.op.inputs[0].tensor

    @property
    def factors(self) -> tuple[str, ...]:
        """The weight, and the bias if there is one."""
        return tuple(use.tensor for use in self.op.inputs[1:])


def product_before(segment: Segment, norm: Op) -> Product | None:
    """The product that makes a norm's input, if covariances of what it reads are the easier way."""
    read = norm.inputs[0].tensor
    op = next((op for op in segment.ops if read in op.writes()), None)
    if op is None or norm.type not in BATCH_NORMS or not is_product(segment.graph, op):
        return None
    site = site_of(segment.graph, op)
    given = {use.tensor for use in op.inputs[1:]} <= set(segment.inputs)
    if not given or site.inputs[0].dtype not in _EXACT:
        return None
    made, read_channels = shape_of(site.outputs[0])[1], shape_of(site.inputs[0])[1]
    places = elements_of(site.outputs[0]) // made
    work = read_channels**2 * (places + made) / macs_of(site)
    strides = tuple(window.stride for window in windows_of(site))
    return Product(op, strides, work) if work <= 1 else None


def is_product(graph: Graph, op: Op) -> bool:
    """Whether an op multiplies the channels of single places, all by the same weight."""
    if op.type != _CONVOLUTION or op.attributes["groups"] != 1:
        return False
    return not any(w.kernel > 1 or w.before or w.transposed for w in windows_of(site_of(graph, op)))
