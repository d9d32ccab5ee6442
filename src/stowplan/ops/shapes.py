"""The shapes an op's outputs have, from its inputs' shapes and its attributes. No rule, no answer."""

from itertools import zip_longest
from math import prod

from stowplan.errors import MissingRule
from stowplan.ir import Shape
from stowplan.ops.sliding import output_sizes
from stowplan.ops.table import Site, Table, shape_of
from stowplan.ops.windows import windows_of

output_shapes_of: Table[tuple[Shape, ...]] = Table("output shapes")


@output_shapes_of.entry("ConvolutionForward", "conv2d")
def channels_first_convolution(site: Site) -> tuple[Shape, ...]:
    """[n, channels, h, w] by a weight [(groups,) out, in, kh, kw]."""
    batch, _, *sizes = shape_of(site.inputs[0])
    channels = prod(shape_of(site.inputs[1])[:-3])
    return _with_workspaces(site, (batch, channels, *output_sizes(windows_of(site), sizes)))


@output_shapes_of.entry("PoolingForward", "maxpool2d")
def channels_first_pool(site: Site) -> tuple[Shape, ...]:
    """[n, channels, h, w]: channels stay."""
    batch, channels, *sizes = shape_of(site.inputs[0])
    return _with_workspaces(site, (batch, channels, *output_sizes(windows_of(site), sizes)))


@output_shapes_of.entry("Elemwise")
def pointwise(site: Site) -> tuple[Shape, ...]:
    """The operands' shapes, broadcast from the last dim."""
    shapes = [shape_of(tensor) for tensor in site.inputs]
    columns = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return (tuple(max(sizes) if 0 not in sizes else 0 for sizes in columns)[::-1],)


@output_shapes_of.entry("MatrixMul")
def matrix_multiplication(site: Site) -> tuple[Shape, ...]:
    """[m, k] by [k, n], each transposed first where the op says so."""
    left, right = (shape_of(tensor) for tensor in site.inputs)
    rows = left[1] if site.attributes.get("transposeA") else left[0]
    columns = right[0] if site.attributes.get("transposeB") else right[1]
    return _with_workspaces(site, (rows, columns))


@output_shapes_of.entry("Reduce")
def reduction(site: Site) -> tuple[Shape, ...]:
    """The reduced dim stays, with size 1."""
    shape, axis = shape_of(site.inputs[0]), site.attributes.get("axis")
    if not isinstance(axis, int) or axis not in range(len(shape)):
        raise MissingRule(f"output shapes: {site.op.id!r} reduces dim {axis!r} of {shape}")
    return _with_workspaces(site, (*shape[:axis], 1, *shape[axis + 1 :]))


def _with_workspaces(site: Site, shape: Shape) -> tuple[Shape, ...]:
    """The result's shape, then those of workspaces, which only the op that asked for them knows."""
    return (shape, *(shape_of(tensor) for tensor in site.outputs[1:]))
