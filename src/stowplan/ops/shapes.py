"""The shapes an op's outputs have, from its inputs' shapes and its attributes. No rule, no answer."""

from collections.abc import Iterator
from itertools import zip_longest
from math import prod

from stowplan.errors import MissingRule
from stowplan.ir import Attribute, Shape
from stowplan.ops.table import Site, Table, shape_of
from stowplan.ops.windows import output_sizes, windows_of

output_shapes_of: Table[tuple[Shape, ...]] = Table("output shapes")


@output_shapes_of.entry("Convolution2DFunction", "ConvolutionForward", "conv2d")
def channels_first_convolution(site: Site) -> tuple[Shape, ...]:
    """[n, channels, h, w] by a weight [(groups,) out, in, kh, kw]."""
    batch, _, *sizes = _image(site)
    channels = prod(shape_of(site.inputs[1])[:-3])
    return _with_workspaces(site, (batch, channels, *output_sizes(windows_of(site), sizes)))


@output_shapes_of.entry("MaxPooling2D", "PoolingForward", "maxpool2d")
def channels_first_pool(site: Site) -> tuple[Shape, ...]:
    """[n, channels, h, w]: channels stay."""
    batch, channels, *sizes = _image(site)
    return _with_workspaces(site, (batch, channels, *output_sizes(windows_of(site), sizes)))


@output_shapes_of.entry("Deconvolution2DFunction")
def channels_first_deconvolution(site: Site) -> tuple[Shape, ...]:
    """[n, channels, h, w] by a weight [in, out / groups, kh, kw]."""
    batch, _, *sizes = _image(site)
    windows = windows_of(site)
    groups = _integer(site, site.attributes.get("groups", 1))
    return ((batch, shape_of(site.inputs[1])[1] * groups, *output_sizes(windows, sizes)),)


@output_shapes_of.entry("Conv2D")
def tensorflow_convolution(site: Site) -> tuple[Shape, ...]:
    """In either data format, by a filter [kh, kw, in, out]."""
    return (_tensorflow_image(site, channels=shape_of(site.inputs[1])[-1]),)


@output_shapes_of.entry("MaxPool")
def tensorflow_pool(site: Site) -> tuple[Shape, ...]:
    """In either data format: channels stay."""
    image = _image(site)
    is_channels_first = site.attributes.get("data_format") == "NCHW"
    return (_tensorflow_image(site, channels=image[1] if is_channels_first else image[3]),)


def _tensorflow_image(site: Site, channels: int) -> Shape:
    batch, *_ = image = _image(site)
    if site.attributes.get("data_format") == "NCHW":
        return (batch, channels, *output_sizes(windows_of(site), image[2:]))
    return (batch, *output_sizes(windows_of(site), image[1:3]), channels)


def _image(site: Site) -> Shape:
    """The shape of the first input, which has a batch, channels and two spatial dims."""
    shape = shape_of(site.inputs[0])
    if len(shape) != 4:
        raise MissingRule(f"output shapes: {site.op.id!r} reads images, but {site.inputs[0].id!r} is {shape}")
    return shape


@output_shapes_of.entry("ReLU", "Dropout")
@output_shapes_of.entry("Identity", "BiasAdd", "Relu", "LRN", "ReluGrad", "LRNGrad", "MaxPoolGrad")
@output_shapes_of.entry("filterA", "filterNL", "filterNL.grad")
def same_as_first(site: Site) -> tuple[Shape, ...]:
    """Every output has the shape of the first input: a dropout's mask too."""
    return (shape_of(site.inputs[0]),) * len(site.outputs)


@output_shapes_of.entry("Concat")
def concatenation(site: Site) -> tuple[Shape, ...]:
    """Sizes add up along one dim and agree in the others."""
    first, *rest = shapes = [shape_of(tensor) for tensor in site.inputs]
    axis = _integer(site, site.attributes.get("axis"))
    others = {(len(shape), shape[:axis], shape[axis + 1 :]) for shape in shapes}
    if not 0 <= axis < len(first) or len(others) != 1:
        raise MissingRule(f"output shapes: {site.op.id!r} cannot join {shapes} along dim {axis}")
    return ((*first[:axis], first[axis] + sum(shape[axis] for shape in rest), *first[axis + 1 :]),)


@output_shapes_of.entry("GetItem")
def basic_index(site: Site) -> tuple[Shape, ...]:
    """Slices (start, stop, step), integers, None for a new dim and "..." for the dims in between."""
    shape, indices = shape_of(site.inputs[0]), site.attributes.get("slices")
    if not isinstance(indices, tuple):
        raise MissingRule(f"output shapes: {site.op.id!r} has the index {indices!r}, not slices and integers")
    missing = len(shape) - sum(index is not None and index != "..." for index in indices)
    if missing < 0:
        raise MissingRule(f"output shapes: {site.op.id!r} has {len(indices)} indices for {shape}")
    whole: Attribute = (None, None, None)
    at = indices.index("...") if "..." in indices else len(indices)
    full = (*indices[:at], *(whole,) * missing, *indices[at + 1 :])
    sizes = iter(shape)
    return (tuple(size for index in full for size in _indexed(site, index, sizes)),)


def _indexed(site: Site, index: Attribute, sizes: Iterator[int]) -> tuple[int, ...]:
    """The sizes that one index makes of the dims it takes from `sizes`."""
    if index is None:
        return (1,)
    size = next(sizes)
    if isinstance(index, int):
        return ()
    if not isinstance(index, tuple) or len(index) != 3 or index[2] == 0:
        raise MissingRule(f"output shapes: {site.op.id!r} has the index {index!r}")
    bounds = (None if bound is None else _integer(site, bound) for bound in index)
    return (len(range(*slice(*bounds).indices(size))),)


@output_shapes_of.entry("SoftmaxCrossEntropy")
def cross_entropy(site: Site) -> tuple[Shape, ...]:
    """A scalar, or one loss per label where nothing is reduced."""
    return ((),) if site.attributes.get("reduce") == "mean" else (shape_of(site.inputs[1]),)


def _integer(site: Site, value: Attribute) -> int:
    if not isinstance(value, int):
        raise MissingRule(f"output shapes: {site.op.id!r} needs an integer, not {value!r}")
    return value


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


@output_shapes_of.entry("filter")
def untied_filter(site: Site) -> tuple[Shape, ...]:
    """[n, in, h, w] by a filter [out, 1, 1, in, kh, kw, h', w'] that has a kernel for every output pixel."""
    batch, filters = _image(site)[0], shape_of(site.inputs[1])
    if len(filters) != 8:
        raise MissingRule(f"output shapes: the filter of {site.op.id!r} is {filters}, not of 8 dims")
    return ((batch, filters[0], *filters[6:]),)


@output_shapes_of.entry("linear")
def image_classifier(site: Site) -> tuple[Shape, ...]:
    """[n, channels, h, w] by a matrix [classes, channels, h, w]: one number per sample and class."""
    return ((_image(site)[0], shape_of(site.inputs[1])[0], 1, 1),)


@output_shapes_of.entry("softmax")
def softmax_with_loss(site: Site) -> tuple[Shape, ...]:
    """Probabilities like the scores, and one loss that keeps all dims."""
    scores = shape_of(site.inputs[0])
    return (scores, (1,) * len(scores))


@output_shapes_of.entry("filter.grad", "filterA.grad", "linear.grad", "softmax.grad")
def like_its_operand(site: Site) -> tuple[Shape, ...]:
    """Each gradient has the shape of the operand it is the gradient of."""
    shapes = {tensor.id: shape_of(tensor) for tensor in site.inputs}
    missing = [tensor.id for tensor in site.outputs if tensor.gradient_of not in shapes]
    if missing:
        raise MissingRule(f"output shapes: {site.op.id!r} does not read what {missing[0]!r} is a gradient of")
    return tuple(shapes[tensor.gradient_of or ""] for tensor in site.outputs)
