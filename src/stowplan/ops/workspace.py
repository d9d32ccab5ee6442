"""Workspace of a kernel in addition to operands and results: an estimate, used where nothing may run.

Only ops with large workspace have a rule. The rules describe PyTorch's CPU kernels with several threads:
oneDNN's convolutions copy operands and result into blocks of 16 channels, small convolutions unfold the image
into columns, and some kernels copy operands that are not contiguous.
"""

from math import prod

from stowplan.ir import DType, Tensor
from stowplan.ops.table import Site, Table, elements_of, shape_of

_BLOCK = 16  # channels
_SMALL = 20480  # elements, over its first four dims, of an image that is unfolded if it is alone in its batch


def no_workspace(_: Site) -> int:
    """The stated default: a kernel works on its operands and results alone."""
    return 0


workspace_of: Table[int] = Table("workspace", default=no_workspace)


@workspace_of.entry("aten.convolution.default")
def convolution(site: Site) -> int:
    """The blocked image and weight are freed before the blocked result is copied into the result."""
    image, weight, result = *site.inputs[:2], site.outputs[0]
    if _is_unfolded(site, image, weight):
        return _columns(site, image, weight, result)
    made, weights = _blocked(result), _blocked_weight(site, weight)
    if site.attributes["transposed"]:
        return made + max(weights, made)
    return _copies(image) + max(_read(site, image) + weights + made - _bytes(result), made)


@workspace_of.entry("aten.convolution_backward.default")
def convolution_adjoint(site: Site) -> int:
    """The image's gradient is made first, then the weight's, which takes no memory until then."""
    gradient, image, weight = site.inputs[:3]
    if _is_unfolded(site, image, weight):
        return _columns(site, image, weight, gradient)
    weights = _blocked_weight(site, weight) - _bytes(weight)
    for_weight = max(_read(site, image) + _blocked(gradient) + weights, weights + _bytes(weight))
    if site.attributes["transposed"]:
        return for_weight
    return _copies(gradient, image) + max(_for_image_gradient(site, weights), for_weight)


def _for_image_gradient(site: Site, weights: int) -> int:
    """For a strided convolution it is copied twice."""
    gradient, image, weight = site.inputs[:3]
    if not _wants_image(site):
        return 0
    if _is_strided(site):
        return _blocked(image) + _bytes(image) - _bytes(weight)
    return _blocked(gradient) + weights + _blocked(image) - _bytes(image)


@workspace_of.entry("aten.native_batch_norm_backward.default")
def one_more_gradient(site: Site) -> int:
    """Another tensor of the image's size."""
    return _bytes(site.inputs[0])


@workspace_of.entry("aten.native_layer_norm.default", "aten.native_layer_norm_backward.default")
@workspace_of.entry("aten.embedding_dense_backward.default")
def contiguous_copies(site: Site) -> int:
    """Operands that are not contiguous are copied."""
    return _copies(*site.inputs)


@workspace_of.entry("aten.upsample_nearest2d.default")
def channels_last_copies(site: Site) -> int:
    """Image and result are copied to and from another layout."""
    return _bytes(site.inputs[0]) + _bytes(site.outputs[0])


@workspace_of.entry("aten.roll.default")
def one_copy_per_further_dim(site: Site) -> int:
    """Dims are rolled one after the other, each into a new tensor."""
    dims = site.attributes["dims"]
    return _bytes(site.outputs[0]) if isinstance(dims, tuple) and len(dims) > 1 else 0


@workspace_of.entry("aten._safe_softmax.default")
def mask_of_the_input(site: Site) -> int:
    """A truth value for each element: whether it is masked."""
    return elements_of(site.inputs[0])


@workspace_of.entry("aten.mse_loss.default")
def differences(site: Site) -> int:
    """The squared differences, and as much again for the result before it is reduced."""
    return 2 * _bytes(site.inputs[0])


def _wants_image(site: Site) -> bool:
    wanted = site.attributes["output_mask"]
    return isinstance(wanted, tuple) and bool(wanted[0])


def _is_strided(site: Site) -> bool:
    strides = site.attributes["stride"]
    return isinstance(strides, tuple) and any(stride != 1 for stride in strides)


def _is_unfolded(site: Site, image: Tensor, weight: Tensor) -> bool:
    """PyTorch's own choice: oneDNN has no double precision and is slower for a single small image."""
    batch, *sizes = shape_of(image)[:4]
    is_small = batch == 1 and prod(sizes) <= _SMALL
    has_large_kernel = all(size > 3 for size in shape_of(weight)[2:])
    is_grouped = site.attributes["groups"] != 1
    return image.dtype is DType.FLOAT64 or (is_small and not has_large_kernel and not is_grouped)


def _columns(site: Site, image: Tensor, weight: Tensor, result: Tensor) -> int:
    """The part of the image that is under the kernel at each of its places."""
    batch, _, *places = shape_of(image if site.attributes["transposed"] else result)
    _, channels, *kernel = shape_of(weight)
    return 0 if prod(kernel) == 1 else prod((batch, *places, channels, *kernel)) * _itemsize(image)


def _read(site: Site, image: Tensor) -> int:
    """The blocked image; one of few channels, like a network's input, is read as it is."""
    is_read_as_it_is = shape_of(image)[1] < _BLOCK and site.attributes["groups"] == 1
    return 0 if is_read_as_it_is else _blocked(image)


def _blocked(image: Tensor) -> int:
    batch, channels, *sizes = shape_of(image)
    return prod((batch, _in_blocks(channels), *sizes)) * _itemsize(image)


def _blocked_weight(site: Site, weight: Tensor) -> int:
    outputs, inputs, *sizes = shape_of(weight)
    if site.attributes["groups"] != 1 or inputs < _BLOCK:
        return _bytes(weight)
    return prod((_in_blocks(outputs), _in_blocks(inputs), *sizes)) * _itemsize(weight)


def _in_blocks(channels: int) -> int:
    return -(-channels // _BLOCK) * _BLOCK


def _copies(*operands: Tensor) -> int:
    return sum(_bytes(operand) for operand in operands if operand.layout)


def _bytes(tensor: Tensor) -> int:
    return elements_of(tensor) * _itemsize(tensor)


def _itemsize(tensor: Tensor) -> int:
    return (tensor.dtype or DType.FLOAT32).itemsize
