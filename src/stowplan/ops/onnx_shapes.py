"""The shapes that ONNX's ops make. Constants that a shape depends on are attributes of the op: `input_1`."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import starmap
from math import prod

from stowplan.errors import MissingRule
from stowplan.ir import Attribute, Shape
from stowplan.ops.shapes import pointwise as broadcast
from stowplan.ops.table import Site, Table, shape_of
from stowplan.ops.windows import Window, output_sizes

onnx_shapes_of: Table[tuple[Shape, ...]] = Table("output shapes")

STATISTICS = {"onnx.BatchNormalization": (3, 4)}
"""By op type, the inputs that are running statistics."""

RESIZES = ("onnx.Resize", "onnx.Upsample")
"""Ops whose operands, but for the first, are scales and sizes."""


def constant_key(position: int) -> str:
    """The attribute that holds the value of a constant input."""
    return f"input_{position}"


def onnx(*names: str) -> tuple[str, ...]:
    """The op types of these names of ONNX."""
    return tuple(f"onnx.{name}" for name in names)


UNARY = onnx(
    *("Relu", "Sigmoid", "Tanh", "Erf", "Gelu", "LeakyRelu", "Elu", "Selu", "Celu", "Softplus", "Softsign"),
    *("HardSigmoid", "HardSwish", "Mish", "ThresholdedRelu", "Clip", "Softmax", "LogSoftmax", "Hardmax"),
    *("Identity", "Cast", "Neg", "Abs", "Sqrt", "Reciprocal", "Exp", "Log", "Sin", "Cos", "Floor", "Ceil"),
    *("Round", "Sign", "Not", "IsNaN", "IsInf", "Trilu", "CumSum", "LRN", "Swish", "QuickGelu"),
)
BINARY = onnx(
    *("Add", "Sub", "Mul", "Div", "Pow", "PRelu", "Max", "Min", "Sum", "Mean", "Mod", "Where", "Equal"),
    *("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor"),
)
REDUCTIONS = onnx(
    *(
        f"Reduce{name}"
        for name in ("Mean", "Sum", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSumExp")
    ),
)
NORMS = onnx(
    *("LayerNormalization", "InstanceNormalization", "GroupNormalization", "RMSNormalization"),
)


@onnx_shapes_of.entry(*UNARY, *NORMS, "onnx.Dropout")
def same_as_first(site: Site) -> tuple[Shape, ...]:
    """Every output has the shape of the first input: a dropout's mask too."""
    return (shape_of(site.inputs[0]),) * max(1, len(site.outputs))


@onnx_shapes_of.entry("onnx.BatchNormalization")
def batch_norm(site: Site) -> tuple[Shape, ...]:
    """The image, then statistics per channel."""
    return (shape_of(site.inputs[0]), *(shape_of(site.inputs[1]),) * 4)


onnx_shapes_of.entry(*BINARY)(broadcast)


@onnx_shapes_of.entry("onnx.Conv", "onnx.ConvTranspose")
def convolution(site: Site) -> tuple[Shape, ...]:
    """[n, channels, sizes..] by a weight [out, in / group, k..], transposed [in, out / group, k..]."""
    batch, _, *sizes = shape_of(site.inputs[0])
    out, per_group, *kernels = shape_of(site.inputs[1])
    transposed = site.op.type == "onnx.ConvTranspose"
    windows = _windows(site, tuple(kernels), tuple(sizes), transposed=transposed)
    channels = per_group * _integer(site, "group", 1) if transposed else out
    return ((batch, channels, *output_sizes(windows, sizes)),)


@onnx_shapes_of.entry("onnx.MaxPool", "onnx.AveragePool", "onnx.LpPool")
def pool(site: Site) -> tuple[Shape, ...]:
    """Channels stay; a second output holds indices."""
    batch, channels, *sizes = shape_of(site.inputs[0])
    windows = _windows(site, _integers(site, "kernel_shape", len(sizes)), tuple(sizes))
    shape = (batch, channels, *output_sizes(windows, sizes))
    return (shape,) * max(1, len(site.outputs))


@onnx_shapes_of.entry("onnx.GlobalAveragePool", "onnx.GlobalMaxPool")
def global_pool(site: Site) -> tuple[Shape, ...]:
    """One number per channel."""
    batch, channels, *sizes = shape_of(site.inputs[0])
    return ((batch, channels, *(1,) * len(sizes)),)


def _windows(site: Site, kernels: Shape, sizes: Shape, *, transposed: bool = False) -> tuple[Window, ...]:
    ndim = len(kernels)
    strides = _integers(site, "strides", ndim, 1)
    dilations = _integers(site, "dilations", ndim, 1)
    extra = _integers(site, "output_padding", ndim, 0)
    ceil = bool(site.attributes.get("ceil_mode")) and not transposed
    plain = [
        Window(k, s, 0, -e, d, transposed)
        for k, s, e, d in zip(kernels, strides, extra, dilations, strict=True)
    ]
    before, after = _padding(site, plain, sizes)
    return tuple(
        replace(w, before=b, after=w.after + a if transposed else a + (w.stride - 1) * ceil)
        for w, b, a in zip(plain, before, after, strict=True)
    )


def _padding(site: Site, windows: Sequence[Window], sizes: Shape) -> tuple[Shape, Shape]:
    """The given padding, beginnings before ends, or the padding that gives the wanted outputs."""
    ndim, outputs = len(windows), _given_outputs(site, windows, sizes)
    if outputs is None:
        pads = _integers(site, "pads", 2 * ndim, 0)
        return pads[:ndim], pads[ndim:]
    whole = tuple(starmap(_pad_for, zip(windows, sizes, outputs, strict=True)))
    return tuple(pad // 2 for pad in whole), tuple(pad - pad // 2 for pad in whole)


def _given_outputs(site: Site, windows: Sequence[Window], sizes: Shape) -> Shape | None:
    """SAME means ceil(inputs / stride) outputs, and inputs * stride for a transposed convolution."""
    if site.op.type == "onnx.ConvTranspose" and "output_shape" in site.attributes:
        return _integers(site, "output_shape", len(windows))
    if site.attributes.get("auto_pad") not in ("SAME_UPPER", "SAME_LOWER"):
        return None
    return tuple(
        size * window.stride if window.transposed else -(-size // window.stride)
        for size, window in zip(sizes, windows, strict=True)
    )


def _pad_for(window: Window, inputs: int, outputs: int) -> int:
    """The padding of both sides together, so that `inputs` make `outputs`."""
    if window.transposed:
        return window.output_size(inputs) - outputs
    return max(0, (outputs - 1) * window.stride + window.extent - inputs)


@onnx_shapes_of.entry("onnx.MatMul")
def matrix_multiplication(site: Site) -> tuple[Shape, ...]:
    """The last two dims multiply, the others are broadcast; an operand of one dim is a row, then a column."""
    left, right = (shape_of(tensor) for tensor in site.inputs[:2])
    if not left or not right:
        raise MissingRule(f"{site.op.id!r} multiplies {left} by {right}")
    rank = max(len(left), len(right), 2) - 2
    batches = [(1,) * (rank - len(shape[:-2])) + shape[:-2] for shape in (left, right)]
    return ((*map(max, *batches), *left[-2:-1], *right[-1:] * (len(right) > 1)),)


@onnx_shapes_of.entry("onnx.Gemm")
def affine(site: Site) -> tuple[Shape, ...]:
    """[m, k] by [k, n], each transposed first where the op says so."""
    (rows, left), (right, columns) = (shape_of(tensor) for tensor in site.inputs[:2])
    rows = left if site.attributes.get("transA") else rows
    return ((rows, right if site.attributes.get("transB") else columns),)


@onnx_shapes_of.entry("onnx.Flatten")
def flatten(site: Site) -> tuple[Shape, ...]:
    """Two dims: those before the axis, and those from it on."""
    shape, axis = shape_of(site.inputs[0]), _integer(site, "axis", 1)
    return ((prod(shape[:axis]), prod(shape[axis:])),)


@onnx_shapes_of.entry("onnx.Reshape")
def reshape(site: Site) -> tuple[Shape, ...]:
    """0 keeps a dim, unless `allowzero` is set; -1 is the rest."""
    shape, wanted = shape_of(site.inputs[0]), _constant(site, 1)
    keeps = not site.attributes.get("allowzero")
    unclear = 0 in wanted[len(shape) :] if keeps else 0 in wanted and -1 in wanted
    if any(size < -1 for size in wanted) or wanted.count(-1) > 1 or unclear:
        raise MissingRule(f"{site.op.id!r} asks for the shape {wanted}")
    kept = [shape[at] if keeps and size == 0 else size for at, size in enumerate(wanted)]
    rest = prod(size for size in kept if size != -1)
    return (tuple(prod(shape) // max(1, rest) if size == -1 else size for size in kept),)


@onnx_shapes_of.entry("onnx.Transpose")
def transpose(site: Site) -> tuple[Shape, ...]:
    """Dims in the order of `perm`, or turned round."""
    shape = shape_of(site.inputs[0])
    order = _integers(site, "perm", len(shape)) if "perm" in site.attributes else range(len(shape))[::-1]
    if sorted(order) != list(range(len(shape))):
        raise MissingRule(f"{site.op.id!r} has perm {tuple(order)} for {shape}")
    return (tuple(shape[at] for at in order),)


@onnx_shapes_of.entry("onnx.Squeeze", "onnx.Unsqueeze")
def squeeze(site: Site) -> tuple[Shape, ...]:
    """Dims of size 1 dropped or put in at the axes, an attribute or a constant input."""
    shape = shape_of(site.inputs[0])
    given = site.attributes.get("axes", site.attributes.get(constant_key(1)))
    if site.op.type == "onnx.Squeeze" and given is None:
        return (tuple(size for size in shape if size != 1),)
    axes = _all_integers(site, given)
    if site.op.type == "onnx.Squeeze":
        dropped = {axis % max(1, len(shape)) for axis in axes}
        return (tuple(size for at, size in enumerate(shape) if at not in dropped),)
    rank = len(shape) + len(axes)
    new, sizes = {axis % rank for axis in axes}, iter(shape)
    if len(new) < len(axes):
        raise MissingRule(f"{site.op.id!r} puts in a dim twice: {axes}")
    return (tuple(1 if at in new else next(sizes) for at in range(rank)),)


@onnx_shapes_of.entry("onnx.Concat")
def concatenation(site: Site) -> tuple[Shape, ...]:
    """Sizes add up along one dim."""
    shapes = [shape_of(tensor) for tensor in site.inputs]
    first, axis = shapes[0], _integer(site, "axis")
    if any(len(shape) != len(first) for shape in shapes) or not -len(first) <= axis < len(first):
        raise MissingRule(f"{site.op.id!r} joins {shapes[:4]} along {axis}")
    axis %= len(first)
    return ((*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :]),)


@onnx_shapes_of.entry("onnx.Gather")
def gather(site: Site) -> tuple[Shape, ...]:
    """The dims of the indices in place of the axis: an embedding's rows."""
    shape, indices = (shape_of(tensor) for tensor in site.inputs[:2])
    if not shape:
        raise MissingRule(f"{site.op.id!r} gathers from a scalar")
    axis = _integer(site, "axis", 0) % len(shape)
    return ((*shape[:axis], *indices, *shape[axis + 1 :]),)


@onnx_shapes_of.entry("onnx.Shape")
def shape_as_tensor(site: Site) -> tuple[Shape, ...]:
    """One number per dim."""
    return ((len(shape_of(site.inputs[0])),),)


@onnx_shapes_of.entry(*REDUCTIONS)
def reduction(site: Site) -> tuple[Shape, ...]:
    """Reduced dims stay with size 1 unless `keepdims` is 0; no axes means all, or none if the op says so."""
    shape = shape_of(site.inputs[0])
    given = site.attributes.get("axes", site.attributes.get(constant_key(1)))
    every = () if site.attributes.get("noop_with_empty_axes") else tuple(range(len(shape)))
    axes = [a % max(1, len(shape)) for a in _all_integers(site, given)] if given else every
    keep = bool(site.attributes.get("keepdims", 1))
    sizes = [1 if at in axes else size for at, size in enumerate(shape)]
    return (tuple(size for at, size in enumerate(sizes) if keep or at not in axes),)


@onnx_shapes_of.entry("onnx.Expand")
def expand(site: Site) -> tuple[Shape, ...]:
    """Broadcast against a shape given as a constant."""
    shape, wanted = shape_of(site.inputs[0]), _constant(site, 1)
    rank = max(len(shape), len(wanted))
    padded = [(1,) * (rank - len(sizes)) + tuple(sizes) for sizes in (shape, wanted)]
    return (tuple(map(max, *padded)) if rank else (),)


@onnx_shapes_of.entry(*RESIZES)
def resize(site: Site) -> tuple[Shape, ...]:
    """To sizes, or by scales, whichever constant comes last."""
    shape = shape_of(site.inputs[0])
    for position in reversed(range(1, len(site.inputs))):
        values = site.attributes.get(constant_key(position))
        if isinstance(values, tuple) and len(values) == len(shape):
            pairs = [(s, v) for s, v in zip(shape, values, strict=True) if isinstance(v, int | float)]
            return (tuple(v if isinstance(v, int) else int(s * min(v, 1e6)) for s, v in pairs),)
    raise MissingRule(f"{site.op.id!r} has neither scales nor sizes for {shape}")


def _constant(site: Site, position: int) -> tuple[int, ...]:
    return _all_integers(site, site.attributes.get(constant_key(position)))


def _all_integers(site: Site, value: Attribute) -> tuple[int, ...]:
    values = value if isinstance(value, tuple) else ()
    integers = tuple(item for item in values if isinstance(item, int) and abs(item) < 2**62)
    if not isinstance(value, tuple) or len(integers) < len(values):
        raise MissingRule(f"{site.op.id!r} depends on integers that are not in the file")
    return integers


def _integer(site: Site, key: str, default: int | None = None) -> int:
    value = site.attributes.get(key, default)
    if not isinstance(value, int) or abs(value) >= 2**31:
        raise MissingRule(f"attribute {key!r} of {site.op.id!r} is {value!r}, not an integer")
    return value


def _integers(site: Site, key: str, count: int, default: int | None = None) -> tuple[int, ...]:
    value = site.attributes.get(key, None if default is None else (default,) * count)
    integers = _all_integers(site, value)
    if len(integers) != count or any(abs(item) >= 2**31 for item in integers):
        raise MissingRule(f"attribute {key!r} of {site.op.id!r} is {value!r}, not {count} integers")
    return integers
