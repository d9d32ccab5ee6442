"""How many multiply-accumulates an op takes. Pointwise work, pooling and copies count as none."""

from math import prod

from stowplan.ops.table import Site, Table, elements_of, shape_of


def no_macs(_: Site) -> int:
    """The stated default: an op without a rule multiplies nothing."""
    return 0


macs_of: Table[int] = Table("macs", default=no_macs)


@macs_of.entry("ConvolutionForward", "conv2d")
def channels_first_convolution(site: Site) -> int:
    """Each output takes one weight [.., in, kh, kw]; with groups, `in` is already a group's share."""
    return elements_of(site.outputs[0]) * prod(shape_of(site.inputs[1])[-3:])


@macs_of.entry("MatrixMul")
def matrix_multiplication(site: Site) -> int:
    """Each output takes a row of the left matrix."""
    rows, columns = shape_of(site.inputs[0])[-2:]
    return elements_of(site.outputs[0]) * (rows if site.attributes.get("transposeA") else columns)
