"""How many bytes an op moves. The default, each operand and result once, is right for most ops."""

from stowplan.ops import aten
from stowplan.ops.table import Site, Table


def each_tensor_once(site: Site) -> int:
    """The stated default: every tensor read or written passes through memory once."""
    return sum(tensor.nbytes or 0 for tensor in (*site.inputs, *site.outputs))


traffic_of: Table[int] = Table("traffic", default=each_tensor_once)


@traffic_of.entry("Reshape", "Identity")
@traffic_of.entry("onnx.Reshape", "onnx.Flatten", "onnx.Squeeze", "onnx.Unsqueeze", "onnx.Identity")
@traffic_of.entry(*aten.VIEWS)
def nothing_moves(_: Site) -> int:
    """A view costs no traffic."""
    return 0


@traffic_of.entry("GetItem")
def only_the_slice(site: Site) -> int:
    """A slice reads no more than it writes."""
    return 2 * sum(tensor.nbytes or 0 for tensor in site.outputs)
