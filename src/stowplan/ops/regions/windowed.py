"""Spatial ops: convolutions and pools, pads, interpolation."""

from collections.abc import Sequence

from stowplan.ir import Attribute, Shape
from stowplan.ops.regions.maps import Adaptive, Always, Bordered, Digit, Grouped, Resized, Sliding
from stowplan.ops.regions.relation import DimMap, Need, Partial, Reduction, Regions, Relation
from stowplan.ops.regions.rules import along, barrier, count, identity, integers, rules, whole
from stowplan.ops.table import Site, shape_of
from stowplan.ops.windows import Window, output_sizes, windows_of


@rules.entry("aten.convolution.default")
def aten_convolution(site: Site) -> Regions:
    """Image [n, in, ...], weight [out, in / groups, ...] or, transposed, [in, out / groups, ...]."""
    if len(shape_of(site.inputs[0])) != len(shape_of(site.inputs[1])):
        return barrier(site, f"{site.op.type} reads an image without a batch dim")
    groups = count(site, "groups")
    return _transposed(site, groups) if site.attributes.get("transposed") else _plain(site, groups)


@rules.entry("Convolution2DFunction")
def chainer_convolution(site: Site) -> Regions:
    """Laid out as ATen's."""
    return _plain(site, count(site, "groups"))


@rules.entry("Deconvolution2DFunction")
def chainer_deconvolution(site: Site) -> Regions:
    """Laid out as ATen's transposed convolution."""
    return _transposed(site, count(site, "groups"))


@rules.entry("conv2d")
def tiled_convolution(site: Site) -> Regions:
    """A log that knows channels, but no groups."""
    return _plain(site, groups=1)


def _plain(site: Site, groups: int) -> Regions:
    weight = shape_of(site.inputs[1])
    dims = (Sliding(1, weight[0]), *whole(weight[1:]))
    return _convolution(site, groups, dims)


def _transposed(site: Site, groups: int) -> Regions:
    weight = shape_of(site.inputs[1])
    outputs = shape_of(site.outputs[0])[1]
    share = outputs // groups
    channels = (_group(outputs, weight[0], groups), Digit((1,), (outputs,), 1, share))
    return _convolution(site, groups, (*channels, *whole(weight[2:])))


def _convolution(site: Site, groups: int, weight: tuple[DimMap, ...]) -> Regions:
    """The image under its windows; a group of output channels reads its group of input channels."""
    output = shape_of(site.outputs[0])
    batch, channels, *sizes = shape_of(site.inputs[0])
    image = (
        Sliding(0, batch),
        _group(output[1], channels, groups),
        *along(range(2, len(output)), sizes, windows_of(site)),
    )
    bias = [Need((Sliding(1, output[1]),)) for _ in site.inputs[2:]]
    return Regions((Relation(output, (Need(image, 0.0), Need(weight), *bias)),))


def _group(outputs: int, inputs: int, groups: int) -> DimMap:
    """The input channels that a stretch of output channels reads: all of them where there is one group."""
    if groups == 1:
        return Always(inputs, (0, inputs))
    return Grouped(1, inputs, outputs // groups, inputs // groups)


@rules.entry("ConvolutionForward")
def megengine_convolution(site: Site) -> Regions:
    """Weight [(groups,) out / groups, in / groups, kh, kw]; workspaces after the output are never cut."""
    output, weight = shape_of(site.outputs[0]), shape_of(site.inputs[1])
    groups = weight[0] if len(weight) == 5 else 1
    share = output[1] // groups
    channels = (Digit((1,), (output[1],), 1, share), *whole(weight[-3:]))
    dims = (Grouped(1, groups, share, 1), *channels) if len(weight) == 5 else channels
    return _with_workspaces(site, _convolution(site, groups, dims))


@rules.entry("Conv2D")
def tensorflow_convolution(site: Site) -> Regions:
    """Filter [kh, kw, in, out], the image in either data format."""
    output, shape = shape_of(site.outputs[0]), shape_of(site.inputs[0])
    channel, spatial = _tensorflow_dims(site)
    image = dict(zip(spatial, along(spatial, [shape[dim] for dim in spatial], windows_of(site)), strict=True))
    image |= {0: Sliding(0, shape[0]), channel: Always(shape[channel], (0, shape[channel]))}
    weight = shape_of(site.inputs[1])
    needs = (
        Need(tuple(image[dim] for dim in range(4)), 0.0),
        Need((*whole(weight[:3]), Sliding(channel, weight[3]))),
    )
    return Regions((Relation(output, needs),))


@rules.entry("BiasAdd")
def tensorflow_bias(site: Site) -> Regions:
    """A vector along the channels; where the data format is not written, its size must tell them."""
    shape, size = shape_of(site.outputs[0]), shape_of(site.inputs[1])[0]
    fitting = [dim for dim in (1, len(shape) - 1) if shape[dim] == size]
    if "data_format" not in site.attributes and len(fitting) != 1:
        return barrier(site, f"BiasAdd of {size} channels does not tell which dim of {shape} they are")
    channel = _tensorflow_dims(site)[0] if "data_format" in site.attributes else fitting[0]
    bias = (Sliding(channel, size), *whole(shape_of(site.inputs[1])[1:]))
    return Regions((Relation(shape, (Need(identity(shape)), Need(bias))),))


@rules.entry("filter")
def drawn_filter(site: Site) -> Regions:
    """A valid convolution with its own filter at every place: [out, 1, 1, in, kh, kw, h, w]."""
    output, image, filters = (shape_of(tensor) for tensor in (site.outputs[0], *site.inputs))
    windows = [Window(kernel) for kernel in filters[4:6]]
    if output_sizes(windows, image[2:]) != output[2:]:
        return barrier(site, f"filter makes {output[2:]} of {image[2:]}: its stride is not known")
    places = (Sliding(2, filters[6]), Sliding(3, filters[7]))
    needs = (
        Need((Sliding(0, image[0]), *whole(image[1:2]), *along((2, 3), image[2:], windows))),
        Need((Sliding(1, filters[0]), *whole(filters[1:6]), *places)),
    )
    return Regions((Relation(output, needs),))


def _tensorflow_dims(site: Site) -> tuple[int, tuple[int, int]]:
    """The channel dim and the spatial dims."""
    return (1, (2, 3)) if site.attributes.get("data_format") == "NCHW" else (3, (1, 2))


@rules.entry(
    "aten.max_pool2d_with_indices.default", "aten.max_pool3d_with_indices.default", "aten.max_pool2d.default"
)
@rules.entry("MaxPooling2D", "maxpool2d")
def max_pool(site: Site) -> Regions:
    """Padding never wins."""
    return _pool(site, float("-inf"))


@rules.entry(*(f"aten.avg_pool{n}d.default" for n in (1, 2, 3)))
def average_pool(site: Site) -> Regions:
    """Padding adds nothing; the kernel decides whether it counts."""
    return _pool(site, 0.0)


@rules.entry("PoolingForward")
def megengine_pool(site: Site) -> Regions:
    """The mode says what padding is."""
    fill = float("-inf") if site.attributes.get("mode") == "MAX" else 0.0
    return _with_workspaces(site, _pool(site, fill))


@rules.entry("MaxPool")
def tensorflow_pool(site: Site) -> Regions:
    """In either data format."""
    _, spatial = _tensorflow_dims(site)
    return _pool(site, float("-inf"), spatial)


def _pool(site: Site, fill: float, spatial: Sequence[int] | None = None) -> Regions:
    """Windows over `spatial`, the last dims unless named; every output (values, indices) is alike."""
    shape, windows = shape_of(site.inputs[0]), windows_of(site)
    slid = tuple(range(len(shape) - len(windows), len(shape))) if spatial is None else tuple(spatial)
    dims = list(identity(shape))
    for dim, window in zip(slid, windows, strict=True):
        dims[dim] = Sliding(dim, shape[dim], window)
    need = Need(tuple(dims), fill)
    return Regions(tuple(Relation(shape_of(output), (need,)) for output in site.outputs))


def _with_workspaces(site: Site, regions: Regions) -> Regions:
    """Outputs after the first are scratch memory: they read nothing."""
    nothing: tuple[Need | None, ...] = (None,) * len(site.inputs)
    scratch = (Relation(shape_of(output), nothing) for output in site.outputs[1:])
    return Regions((regions.outputs[0], *scratch))


@rules.entry(
    *(f"aten._adaptive_avg_pool{n}d.default" for n in (2, 3)),
    *(f"aten.adaptive_avg_pool{n}d.default" for n in (1, 2, 3)),
    *(f"aten.adaptive_max_pool{n}d.default" for n in (2, 3)),
)
def adaptive_pool(site: Site) -> Regions:
    """Output i covers its share of the input; a single output covers all of it."""
    shape = shape_of(site.inputs[0])
    ndim = len(_adaptive_sizes(site))
    relations = (_adaptive(site, shape, shape_of(output), len(shape) - ndim) for output in site.outputs)
    return Regions(tuple(relations))


def _adaptive_sizes(site: Site) -> Shape:
    return shape_of(site.outputs[0])[-int(site.op.type.partition("d.")[0][-1]) :]


def _adaptive(site: Site, shape: Shape, output: Shape, first: int) -> Relation:
    pooled = (
        Adaptive(dim, size, count)
        for dim, (size, count) in enumerate(zip(shape[first:], output[first:], strict=True), first)
    )
    partial = Partial.MEAN if "avg" in site.op.type else Partial.MAX
    reduced = all(count == 1 for count in output[first:]) and len(site.outputs) == 1
    reduction = Reduction(partial, {0: tuple(range(first, len(shape)))}) if reduced else None
    return Relation(output, (Need((*identity(shape[:first]), *pooled)),), reduction=reduction)


@rules.entry("aten.constant_pad_nd.default")
def constant_pad(site: Site) -> Regions:
    """The part of the pulled rect outside the input is padding with the op's value."""
    return _padded(site, "constant", integers(site, "pad"))


@rules.entry(*(f"aten.reflection_pad{n}d.default" for n in (1, 2, 3)))
def reflection_pad(site: Site) -> Regions:
    """The border mirrors what lies inside it."""
    return _padded(site, "reflect", integers(site, "padding"))


@rules.entry(*(f"aten.replication_pad{n}d.default" for n in (1, 2, 3)))
def replication_pad(site: Site) -> Regions:
    """The border repeats the last index."""
    return _padded(site, "replicate", integers(site, "padding"))


@rules.entry("aten._pad_circular.default")
def circular_pad(site: Site) -> Regions:
    """The border comes from the other end."""
    return _padded(site, "circular", integers(site, "pad"))


@rules.entry("aten.pad.default")
def any_pad(site: Site) -> Regions:
    """As the attribute `mode` says."""
    return _padded(site, str(site.attributes.get("mode")), integers(site, "pad"))


def _padded(site: Site, mode: str, pad: tuple[int, ...]) -> Regions:
    """`pad` lists (before, after) from the last dim backwards."""
    if mode not in ("constant", "reflect", "replicate", "circular"):
        return barrier(site, f"{site.op.type} pads in the unknown mode {mode!r}")
    shape, output = shape_of(site.inputs[0]), shape_of(site.outputs[0])
    dims = list(identity(shape))
    for position, before in enumerate(pad[::2]):
        dim = len(shape) - 1 - position
        dims[dim] = _padded_dim(mode, dim, shape, output, before)
    value = site.attributes.get("value")
    fill = float(value) if isinstance(value, int | float) else 0.0
    return Regions((Relation(output, (Need(tuple(dims), fill if mode == "constant" else None),)),))


def _padded_dim(mode: str, dim: int, shape: Shape, output: Shape, before: int) -> DimMap:
    if mode == "constant":
        return Sliding(dim, shape[dim], Window(before=before))
    if mode == "circular":
        return Digit((dim,), (output[dim],), 1, shape[dim], -before)
    return Bordered(dim, shape[dim], before, mode == "reflect")


_SCALE_KEYS = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}
_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


def _spellings(name: str) -> tuple[str, str]:
    return f"aten.{name}.default", f"aten.{name}.vec"


@rules.entry(*(spelled for n in (1, 2, 3) for spelled in _spellings(f"upsample_nearest{n}d")))
def nearest(site: Site) -> Regions:
    """The input whose index is the floor of the position."""
    return _resized(site, centre=0.0)


@rules.entry(*(spelled for n in (1, 2, 3) for spelled in _spellings(f"_upsample_nearest_exact{n}d")))
def nearest_exact(site: Site) -> Regions:
    """The input under the centre of the output."""
    return _resized(site, centre=0.5)


@rules.entry(*(s for n, kind in _LINEAR.items() for s in _spellings(f"upsample_{kind}{n}d")))
def linear(site: Site) -> Regions:
    """The two inputs around the position."""
    return _resized(site, after=1)


@rules.entry(*_spellings("upsample_bicubic2d"))
def cubic(site: Site) -> Regions:
    """Two inputs on either side of the position."""
    return _resized(site, before=1, after=2)


def _resized(site: Site, before: int = 0, after: int = 0, centre: float | None = None) -> Regions:
    """`centre` fixes where an output samples; None is ATen's rule for interpolation."""
    shape, output = shape_of(site.inputs[0]), shape_of(site.outputs[0])
    dims = list(identity(shape))
    factors = _factors(site, len(shape) - 2)
    for dim, factor in enumerate(factors, 2):
        scale, offset = _sampling(site, shape[dim], output[dim], factor, centre)
        dims[dim] = Resized(dim, shape[dim], scale, offset, before, after)
    return Regions((Relation(output, (Need(tuple(dims)),)),))


def _sampling(
    site: Site, inputs: int, outputs: int, factor: Attribute, centre: float | None
) -> tuple[float, float]:
    """Scale and offset of the position, by the corners or by the pixels' centres."""
    if site.attributes.get("align_corners"):
        return (inputs - 1) / (outputs - 1) if outputs > 1 else 0.0, 0.0
    given = isinstance(factor, int | float) and factor > 0
    scale = 1 / float(factor) if given and isinstance(factor, int | float) else inputs / outputs
    return scale, 0.5 * scale - 0.5 if centre is None else centre * scale


def _factors(site: Site, ndim: int) -> tuple[Attribute, ...]:
    """The scale factor of each spatial dim where the call gave one; it outranks the ratio of sizes."""
    if site.op.type.endswith(".vec"):
        given = site.attributes.get("scale_factors")
        return given if isinstance(given, tuple) else (None,) * ndim
    return tuple(site.attributes.get(key) for key in _SCALE_KEYS[ndim])
