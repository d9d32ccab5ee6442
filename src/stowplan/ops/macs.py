"""Tables of an op's cost: multiply-accumulates and bytes moved.

Pointwise ops, pooling and copies count no multiply-accumulates.
"""

from math import prod

from stowplan.errors import MissingRule
from stowplan.ir import Tensor
from stowplan.ops import aten
from stowplan.ops.table import Site, Table, elements_of, shape_of


def no_macs(_: Site) -> int:
    """The stated default: an op without a rule multiplies nothing."""
    return 0


macs_of: Table[int] = Table("macs", default=no_macs)


@macs_of.entry("Convolution2DFunction", "ConvolutionForward", "conv2d")
def channels_first_convolution(site: Site) -> int:
    """Each output takes one weight [.., in, kh, kw]; with groups, `in` is already a group's share."""
    return elements_of(site.outputs[0]) * prod(shape_of(site.inputs[1])[-3:])


@macs_of.entry("MatrixMul")
def matrix_multiplication(site: Site) -> int:
    """Each output takes a row of the left matrix."""
    rows, columns = shape_of(site.inputs[0])[-2:]
    return elements_of(site.outputs[0]) * (rows if site.attributes.get("transposeA") else columns)


@macs_of.entry("Deconvolution2DFunction")
def channels_first_deconvolution(site: Site) -> int:
    """Each input spreads one weight [.., out, kh, kw]."""
    return elements_of(site.inputs[0]) * prod(shape_of(site.inputs[1])[-3:])


@macs_of.entry("Convolution2DFunction.backward")
def convolution_adjoint(site: Site) -> int:
    """Inputs (gradient, image, weight, ..): one forward's worth for each of the two gradients it makes."""
    if len(site.inputs) < 3:
        raise MissingRule(f"macs: {site.op.id!r} lists no image and weight")
    forward = elements_of(site.inputs[0]) * prod(shape_of(site.inputs[2])[-3:])
    return forward * _gradients_of(site, site.inputs[1:3])


@macs_of.entry("Deconvolution2DFunction.backward")
def deconvolution_adjoint(site: Site) -> int:
    """Inputs (gradient, image, weight, ..): one forward's worth for each of the two gradients it makes."""
    if len(site.inputs) < 3:
        raise MissingRule(f"macs: {site.op.id!r} lists no image and weight")
    forward = elements_of(site.inputs[1]) * prod(shape_of(site.inputs[2])[-3:])
    return forward * _gradients_of(site, site.inputs[1:3])


def _gradients_of(site: Site, operands: tuple[Tensor, ...]) -> int:
    """How many of these operands the op makes a gradient of."""
    names = {tensor.id for tensor in operands}
    return sum(tensor.gradient_of in names for tensor in site.outputs)


@macs_of.entry("Conv2D")
def tensorflow_convolution(site: Site) -> int:
    """Each output takes one filter [kh, kw, in]."""
    return elements_of(site.outputs[0]) * prod(shape_of(site.inputs[1])[:3])


@macs_of.entry("Conv2DBackpropFilter")
def tensorflow_filter_gradient(site: Site) -> int:
    """Inputs (image, filter sizes, gradient): each gradient element meets one filter [kh, kw, in]."""
    return elements_of(site.inputs[-1]) * prod(shape_of(site.outputs[0])[:3])


@macs_of.entry("Conv2DBackpropInput")
def tensorflow_input_gradient(site: Site) -> int:
    """Inputs (image sizes, filter, gradient): each gradient element meets one filter [kh, kw, in]."""
    return elements_of(site.inputs[-1]) * prod(shape_of(site.inputs[-2])[:3])


@macs_of.entry("filter", "linear")
def untied_weights(site: Site) -> int:
    """Each weight, of [out, 1, 1, in, kh, kw, h, w] or [classes, channels, h, w], meets each sample once."""
    return shape_of(site.inputs[0])[0] * elements_of(site.inputs[1])


@macs_of.entry("filter.grad", "linear.grad")
def untied_adjoint(site: Site) -> int:
    """Inputs (gradient, image, weights): one forward's worth for each of the two gradients it adds to."""
    forward = shape_of(site.inputs[1])[0] * elements_of(site.inputs[2])
    return forward * _gradients_of(site, site.inputs[1:3])


@macs_of.entry("onnx.Conv", "onnx.ConvTranspose")
def onnx_convolution(site: Site) -> int:
    """Each output, or each input if transposed, takes one weight [in or out, k..] of its group."""
    met = site.inputs[0] if site.op.type == "onnx.ConvTranspose" else site.outputs[0]
    return elements_of(met) * prod(shape_of(site.inputs[1])[1:])


@macs_of.entry("onnx.Conv.backward", "onnx.ConvTranspose.backward")
def onnx_convolution_adjoint(site: Site) -> int:
    """Inputs (gradient, image, weight): a forward's worth for the gradient of each of the two."""
    met = site.inputs[1] if site.op.type == "onnx.ConvTranspose.backward" else site.inputs[0]
    forward = elements_of(met) * prod(shape_of(site.inputs[2])[1:])
    return forward * _gradients_of(site, site.inputs[1:3])


@macs_of.entry("onnx.MatMul", "onnx.Gemm")
def onnx_matrix_multiplication(site: Site) -> int:
    """Each output takes a row of the left matrix."""
    rows, columns = shape_of(site.inputs[0])[-2:]
    return elements_of(site.outputs[0]) * (rows if site.attributes.get("transA") else columns)


@macs_of.entry("onnx.MatMul.backward", "onnx.Gemm.backward")
def onnx_matrix_multiplication_adjoint(site: Site) -> int:
    """Inputs (gradient, left, right): a forward's worth for the gradient of each of the two."""
    rows, columns = shape_of(site.inputs[1])[-2:]
    forward = elements_of(site.inputs[0]) * (rows if site.attributes.get("transA") else columns)
    return forward * _gradients_of(site, site.inputs[1:3])


@macs_of.entry("aten.convolution.default")
def aten_convolution(site: Site) -> int:
    """Each output, or each input if transposed, takes one weight [in or out, k..] of its group."""
    met = site.inputs[0] if site.attributes["transposed"] else site.outputs[0]
    return elements_of(met) * prod(shape_of(site.inputs[1])[1:])


@macs_of.entry("aten.convolution_backward.default")
def aten_convolution_adjoint(site: Site) -> int:
    """Inputs (gradient, image, weight): a forward's worth for the gradient of each of the two."""
    met = site.inputs[1] if site.attributes["transposed"] else site.inputs[0]
    wanted = site.attributes["output_mask"]
    gradients = sum(map(bool, wanted[:2])) if isinstance(wanted, tuple) else 0
    return elements_of(met) * prod(shape_of(site.inputs[2])[1:]) * gradients


@macs_of.entry("aten.mm.default", "aten.bmm.default", "aten.mv.default", "aten.dot.default")
@macs_of.entry("aten.addmm.default", "aten.baddbmm.default", "aten.addmv.default")
def aten_matrix_multiplication(site: Site) -> int:
    """Each output takes a row of the left matrix, which may come after a tensor to add to."""
    return elements_of(site.outputs[0]) * shape_of(site.inputs[-2])[-1]


@macs_of.entry(*aten.ATTENTIONS)
def aten_attention(site: Site) -> int:
    """Inputs (queries, keys, values): every query meets every key, every weight every value."""
    return _pairs_of_positions(site.inputs[0], site.inputs[1]) * _features(site.inputs[0], site.inputs[2])


@macs_of.entry(*aten.ATTENTION_ADJOINTS)
def aten_attention_adjoint(site: Site) -> int:
    """Inputs (gradient, queries, keys, values): the weights again, their gradient, and those of all three."""
    _, queries, keys, values, *_ = site.inputs
    return _pairs_of_positions(queries, keys) * _features(queries, values, values, queries, keys)


def _pairs_of_positions(queries: Tensor, keys: Tensor) -> int:
    *batch, count, _ = shape_of(queries)
    return prod(batch) * count * shape_of(keys)[-2]


def _features(*tensors: Tensor) -> int:
    return sum(shape_of(tensor)[-1] for tensor in tensors)


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
