"""Windows: which inputs a sliding kernel reads for which outputs, one dim at a time, on half-open spans.

Convolutions and pools, and their transposes, are products of windows over their spatial dims. The table
`windows_of` gives the windows of each framework's ops. Spans are not clamped: indices below 0 or past the
tensor are padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from stowplan.errors import BadUse, MissingRule
from stowplan.geometry import Rect
from stowplan.ops.table import Site, Table, shape_of

Span: TypeAlias = tuple[int, int]
_NOTHING: Span = (0, 0)


@dataclass(frozen=True, slots=True)
class Window:
    """Output i of a window reads inputs `stride i - before + dilation j`, j = 0 .. kernel-1.

    A transposed window reverses that relation: input i adds into those outputs. `after` only sets the number
    of outputs; it may be negative or larger than `before`.
    """

    kernel: int = 1
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1
    transposed: bool = False

    def __post_init__(self) -> None:
        if min(self.kernel, self.stride, self.dilation) < 1:
            raise BadUse(
                f"a window of kernel {self.kernel}, stride {self.stride}, dilation {self.dilation}: "
                "each must be at least 1"
            )

    @property
    def extent(self) -> int:
        """Inputs from the first to the last one under the kernel."""
        return self.dilation * (self.kernel - 1) + 1

    def pull(self, outputs: Span) -> Span:
        """The inputs needed to produce `outputs`."""
        return self._met(outputs) if self.transposed else self._spread(outputs)

    def reach(self, inputs: Span) -> Span:
        """The outputs that read any of `inputs`: where their gradient comes from."""
        return self._spread(inputs) if self.transposed else self._met(inputs)

    def push(self, inputs: Span) -> Span:
        """The outputs that `inputs` alone suffice to produce; `inputs` includes padding where it applies."""
        low, high = inputs
        if high <= low:
            return _NOTHING
        if self.transposed:
            return (low - 1) * self.stride - self.before + self.extent, high * self.stride - self.before
        first = -((-low - self.before) // self.stride)
        return first, (high + self.before - self.extent) // self.stride + 1

    def output_size(self, inputs: int) -> int:
        """How many outputs `inputs` inputs make."""
        if self.transposed:
            return max(0, self.stride * (inputs - 1) + self.extent - self.before - self.after)
        return max(0, (inputs + self.before + self.after - self.extent) // self.stride + 1)

    def _spread(self, span: Span) -> Span:
        low, high = span
        if high <= low:
            return _NOTHING
        return low * self.stride - self.before, (high - 1) * self.stride - self.before + self.extent

    def _met(self, span: Span) -> Span:
        low, high = span
        if high <= low:
            return _NOTHING
        first = -((self.extent - 1 - low - self.before) // self.stride)
        return first, (high - 1 + self.before) // self.stride + 1


def pull(windows: Sequence[Window], outputs: Rect) -> Rect:
    """The input rect needed for an output rect, over the windows' dims."""
    return _rect([w.pull(span) for w, span in zip(windows, _spans(outputs), strict=True)])


def reach(windows: Sequence[Window], inputs: Rect) -> Rect:
    """The output rect that reads any of an input rect."""
    return _rect([w.reach(span) for w, span in zip(windows, _spans(inputs), strict=True)])


def push(windows: Sequence[Window], inputs: Rect) -> Rect:
    """The output rect that an input rect alone suffices to produce."""
    return _rect([w.push(span) for w, span in zip(windows, _spans(inputs), strict=True)])


def output_sizes(windows: Sequence[Window], inputs: Sequence[int]) -> tuple[int, ...]:
    """The output's spatial sizes from the input's."""
    return tuple(w.output_size(size) for w, size in zip(windows, inputs, strict=True))


def _spans(rect: Rect) -> list[Span]:
    return list(zip(rect.lo, rect.hi, strict=True))


def _rect(spans: list[Span]) -> Rect:
    return Rect(tuple(low for low, _ in spans), tuple(high for _, high in spans))


windows_of: Table[tuple[Window, ...]] = Table("windows")
"""In the order (H, W). Rules may need the shapes of the op's inputs."""


@windows_of.entry("Convolution2DFunction")
def chainer_convolution(site: Site) -> tuple[Window, ...]:
    """Kernel from the weight [out, in, kh, kw]; `cover_all` lets the last output reach past the padding."""
    return _chainer_windows(site, _kernel(site, slice(2, 4)))


@windows_of.entry("MaxPooling2D")
def chainer_pool(site: Site) -> tuple[Window, ...]:
    """Kernel from the attributes."""
    return _chainer_windows(site, (_integer(site, "kh"), _integer(site, "kw")))


@windows_of.entry("Deconvolution2DFunction")
def chainer_deconvolution(site: Site) -> tuple[Window, ...]:
    """Kernel from the weight [in, out, kh, kw]; `outh` and `outw` fix where the output stops."""
    windows = []
    sizes = shape_of(site.inputs[0])[2:4]
    for window, size, side in zip(
        _chainer_windows(site, _kernel(site, slice(2, 4))), sizes, "hw", strict=True
    ):
        whole = replace(window, after=0, transposed=True)
        windows.append(replace(whole, after=whole.output_size(size) - _integer(site, f"out{side}")))
    return tuple(windows)


def _chainer_windows(site: Site, kernels: Sequence[int]) -> tuple[Window, ...]:
    windows = []
    for (axis, side), kernel in zip((("y", "h"), ("x", "w")), kernels, strict=True):
        stride, padding = _integer(site, f"s{axis}"), _integer(site, f"p{side}")
        after = padding + stride - 1 if site.attributes.get("cover_all") else padding
        windows.append(Window(kernel, stride, padding, after, _integer(site, f"d{axis}", 1)))
    return tuple(windows)


@windows_of.entry("ConvolutionForward")
def megengine_convolution(site: Site) -> tuple[Window, ...]:
    """Kernel from the weight [(groups,) out, in, kh, kw]."""
    return _megengine_windows(site, _kernel(site, slice(-2, None)))


@windows_of.entry("PoolingForward")
def megengine_pool(site: Site) -> tuple[Window, ...]:
    """Kernel from the attributes."""
    return _megengine_windows(site, (_integer(site, "window_h"), _integer(site, "window_w")))


def _megengine_windows(site: Site, kernels: Sequence[int]) -> tuple[Window, ...]:
    return tuple(
        Window(
            kernel,
            _integer(site, f"stride_{side}"),
            _integer(site, f"pad_{side}"),
            _integer(site, f"pad_{side}"),
            _integer(site, f"dilate_{side}", 1),
        )
        for side, kernel in zip("hw", kernels, strict=True)
    )


@windows_of.entry("Conv2D")
def tensorflow_convolution(site: Site) -> tuple[Window, ...]:
    """Kernel from the filter [kh, kw, in, out]."""
    return _tensorflow_windows(site, _kernel(site, slice(0, 2)))


@windows_of.entry("MaxPool")
def tensorflow_pool(site: Site) -> tuple[Window, ...]:
    """Kernel from the attribute `ksize`, one number per tensor dim."""
    return _tensorflow_windows(site, _spatial(site, _integers(site, "ksize")))


def _tensorflow_windows(site: Site, kernels: Sequence[int]) -> tuple[Window, ...]:
    """SAME padding makes ceil(inputs / stride) outputs, with the odd element after; VALID is none."""
    same = site.attributes.get("padding") == "SAME"
    strides = _spatial(site, _integers(site, "strides"))
    windows = []
    for size, kernel, stride in zip(_spatial(site, shape_of(site.inputs[0])), kernels, strides, strict=True):
        outputs = -(-size // max(1, stride))
        padding = max(0, (outputs - 1) * stride + kernel - size) if same else 0
        windows.append(Window(kernel, stride, padding // 2, padding - padding // 2))
    return tuple(windows)


def _spatial(site: Site, values: Sequence[int]) -> tuple[int, ...]:
    """The H and W entries of four values in the op's data format."""
    if len(values) != 4:
        raise MissingRule(f"windows of {site.op.id!r}: {tuple(values)} is not one value per tensor dim")
    return tuple(values[2:4] if site.attributes.get("data_format") == "NCHW" else values[1:3])


@windows_of.entry("conv2d", "maxpool2d")
def tiled_window(site: Site) -> tuple[Window, ...]:
    """PyTorch's spelling: kernel_size, stride, padding and dilation, each a pair (H, W)."""
    columns = (_integers(site, key) for key in ("kernel_size", "stride", "padding", "padding", "dilation"))
    return tuple(Window(*row) for row in zip(*columns, strict=True))


@windows_of.entry("aten.convolution.default")
def aten_convolution(site: Site) -> tuple[Window, ...]:
    """Kernel from the weight; `output_padding` adds outputs where the convolution is transposed."""
    kernels = shape_of(site.inputs[1])[2:]
    strides, paddings, dilations, extra = (
        _per_dim(site, key, len(kernels)) for key in ("stride", "padding", "dilation", "output_padding")
    )
    transposed = bool(site.attributes.get("transposed"))
    return tuple(
        Window(kernel, stride, padding, padding - more if transposed else padding, dilation, transposed)
        for kernel, stride, padding, dilation, more in zip(
            kernels, strides, paddings, dilations, extra, strict=True
        )
    )


@windows_of.entry(*(f"aten.max_pool{n}d_with_indices.default" for n in (2, 3)))
@windows_of.entry("aten.max_pool2d.default", *(f"aten.avg_pool{n}d.default" for n in (1, 2, 3)))
def aten_pool(site: Site) -> tuple[Window, ...]:
    """No stride means the kernel's; `ceil_mode` lets the last window reach past the padding."""
    ndim = int(site.op.type.partition("pool")[2][0])
    kernels = _per_dim(site, "kernel_size", ndim)
    strides = _per_dim(site, "stride", ndim) or kernels
    dilations = _per_dim(site, "dilation", ndim) if "dilation" in site.attributes else (1,) * ndim
    rows = zip(kernels, strides, _per_dim(site, "padding", ndim), dilations, strict=True)
    windows = [
        Window(kernel, stride, padding, padding, dilation) for kernel, stride, padding, dilation in rows
    ]
    if site.attributes.get("ceil_mode"):
        sizes = shape_of(site.inputs[0])[-ndim:]
        windows = [_rounded_up(window, size) for window, size in zip(windows, sizes, strict=True)]
    return tuple(windows)


def _rounded_up(window: Window, size: int) -> Window:
    """With one more output if inputs remain, unless its window would begin after the input."""
    reaching = replace(window, after=window.after + window.stride - 1)
    begins = (reaching.output_size(size) - 1) * window.stride
    return window if begins >= size + window.before else reaching


def _per_dim(site: Site, key: str, ndim: int) -> tuple[int, ...]:
    """A list that may hold one number for all dims; an empty one stays empty."""
    values = _integers(site, key)
    return values * ndim if len(values) == 1 else values


def _kernel(site: Site, dims: slice) -> tuple[int, ...]:
    if len(site.inputs) < 2 or len(shape_of(site.inputs[1])) < 4:
        raise MissingRule(f"windows of {site.op.id!r}: its second input is not a weight of four dims")
    return shape_of(site.inputs[1])[dims]


def _integer(site: Site, key: str, default: int | None = None) -> int:
    value = site.attributes.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise MissingRule(f"windows of {site.op.id!r}: attribute {key!r} is {value!r}, not an integer")
    return value


def _integers(site: Site, key: str) -> tuple[int, ...]:
    value = site.attributes.get(key)
    integers = tuple(item for item in value if isinstance(item, int)) if isinstance(value, tuple) else ()
    if integers != value:
        raise MissingRule(
            f"windows of {site.op.id!r}: attribute {key!r} is {value!r}, not a tuple of integers"
        )
    return integers
