"""Convolutions and pools: windows over the spatial dims, groups over the channels."""

from collections.abc import Sequence

from stowplan.ir import Shape
from stowplan.ops.regions.maps import Adaptive, Always, Digit, Grouped, Sliding
from stowplan.ops.regions.relation import DimMap, Need, Partial, Reduction, Regions, Relation
from stowplan.ops.regions.rules import along, barrier, identity, integer, rules, whole
from stowplan.ops.sliding import Window, output_sizes
from stowplan.ops.table import Site, shape_of
from stowplan.ops.windows import windows_of


@rules.entry("aten.convolution.default")
def aten_convolution(site: Site) -> Regions:
    """Image [n, in, ...], weight [out, in / groups, ...] or, transposed, [in, out / groups, ...]."""
    if len(shape_of(site.inputs[0])) != len(shape_of(site.inputs[1])):
        return barrier(site, f"{site.op.type} reads an image without a batch dim")
    groups = integer(site, "groups")
    return _transposed(site, groups) if site.attributes.get("transposed") else _plain(site, groups)


@rules.entry("Convolution2DFunction")
def chainer_convolution(site: Site) -> Regions:
    """Laid out as ATen's."""
    return _plain(site, integer(site, "groups"))


@rules.entry("Deconvolution2DFunction")
def chainer_deconvolution(site: Site) -> Regions:
    """Laid out as ATen's transposed convolution."""
    return _transposed(site, integer(site, "groups"))


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
    """Weight [(groups,) out / groups, in / groups, kh, kw]; workspaces beside the output are never cut."""
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
    """Padding adds nothing; whether it counts is for who runs it to know."""
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
