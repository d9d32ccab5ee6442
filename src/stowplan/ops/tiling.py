"""Whether an op can compute a part of its output from only the parts of its inputs that this needs.

Region rules say which parts are needed. This table says whether the op, called on just those, makes just the
part: an op that depends on the size or position of its input is refused or receives it whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from stowplan.geometry import Rect
from stowplan.ops import aten
from stowplan.ops.effects import Effect, effect_of
from stowplan.ops.regions import DimKind, regions_of
from stowplan.ops.table import Site, Table, shape_of
from stowplan.ops.windows import windows_of


@dataclass(frozen=True, slots=True)
class Part:
    """A rect of output number `output` and, per input, the rect it needs, not clipped."""

    output: int
    made: Rect
    needs: tuple[Rect | None, ...]


Refusal: TypeAlias = Callable[[Part], str]

PartKernel: TypeAlias = Callable[[Any, dict[str, Any]], Any]
"""Makes a part of an op's output: from the call, with `overhang(input)` and `made`, and arguments by name."""

part_kernels: dict[str, PartKernel] = {}
"""Kernels on a part that `register_op_rule` was given; an op without one is called on the parts as it is."""


def no_form(site: Site) -> Refusal:
    """The stated default: a PyTorch op without an entry is refused; an op of a file follows its regions."""
    if "." not in site.op.type:
        return whole_dims_stay_whole(site)
    return lambda _: f"{site.op.type} has no kernel for a part of its output"


refusal_rules: Table[Refusal] = Table("tiles", default=no_form)


def refusal_of(site: Site) -> Refusal:
    """A function from a part to the reason why the op cannot make it from what it needs; "" if it can."""
    barrier = regions_of(site).barrier
    if barrier:
        return lambda _: barrier
    if site.op.type.startswith("aten.") and effect_of(site) & Effect.RANDOM:
        return lambda _: f"{site.op.id} draws random numbers, which tiles would draw in another order"
    rule = refusal_rules(site)
    inputs = [Rect.of_shape(shape_of(tensor)) for tensor in site.inputs]
    outputs = [Rect.of_shape(shape_of(tensor)) for tensor in site.outputs]

    def refusal(part: Part) -> str:
        is_whole = part.made == outputs[part.output] and all(
            need is None or need == whole for whole, need in zip(inputs, part.needs, strict=True)
        )
        return "" if is_whole else rule(part) or _only_padding(site, inputs, part)

    return refusal


def _only_padding(site: Site, inputs: Sequence[Rect], part: Part) -> str:
    """Every needed input must have a part inside its tensor."""
    for whole, need in zip(inputs, part.needs, strict=True):
        if need is not None and need.clip(whole.hi).is_empty:
            return f"{site.op.id} makes {part.made} of nothing but padding"
    return ""


def _is_cut(site: Site, part: Part, dim: int) -> bool:
    shape = shape_of(site.outputs[part.output])
    return (part.made.lo[dim], part.made.hi[dim]) != (0, shape[dim])


def whole_dims_stay_whole(site: Site) -> Refusal:
    """A dim that the op runs over may not be cut."""
    relations = regions_of(site).outputs
    whole = [[dim for dim, kind in enumerate(r.kinds()) if kind is DimKind.WHOLE] for r in relations]

    def refusal(part: Part) -> str:
        relation = relations[part.output]
        for dim in whole[part.output]:
            if _is_cut(site, part, dim):
                return f"{site.op.id}: {relation.whole.get(dim, f'dim {dim} is needed whole')}"
        return ""

    return refusal


_AS_IS = (
    "_prelu_kernel "
    "mm bmm addmm baddbmm linear matmul permute t transpose.int _softmax _log_softmax native_layer_norm "
    "_fused_rms_norm cat _native_batch_norm_legit_no_training clone _to_copy alias detach "
    "mean.dim sum.dim_IntList amax rsub.Scalar"
)
AS_IS = frozenset(
    {
        *(
            name
            for name in (*aten.POINTWISE, *aten.POINTWISE_FIRST)
            if not name.endswith("_backward.default")
        ),
        *(f"aten.{name}" if "." in name else f"aten.{name}.default" for name in _AS_IS.split()),
    }
)
"""Ops that make a part from parts when simply called on them."""

refusal_rules.entry(*sorted(AS_IS))(whole_dims_stay_whole)


@refusal_rules.entry("aten.slice.Tensor", "aten.select.int", "aten.expand.default")
@refusal_rules.entry("aten.split.Tensor", "aten.split_with_sizes.default", "aten.unbind.int")
@refusal_rules.entry("aten.constant_pad_nd.default")
def takes_its_part(_: Site) -> Refusal:
    """The op needs the part itself, or the part without its padding."""
    return lambda _: ""


@refusal_rules.entry("aten.repeat.default")
def repeat(site: Site) -> Refusal:
    """Needs all of a small input, such as the weights of instance norm; the part is cut from its repeats."""
    shape = Rect.of_shape(shape_of(site.inputs[0]))
    return lambda part: "" if part.needs[0] == shape else f"{site.op.id} repeats a part of its input"


@refusal_rules.entry("aten.embedding.default")
def embedding(site: Site) -> Refusal:
    """Rows are looked up one by one, unless their gradients are divided by how often they come."""
    counted = bool(site.attributes.get("scale_grad_by_freq"))
    return lambda _: f"{site.op.id} divides gradients by counts over all tokens" if counted else ""


RESHAPES = (
    *(f"aten.{name}.default" for name in ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze")),
    "aten.squeeze.dim",
    "aten.squeeze.dims",
)


@refusal_rules.entry(*RESHAPES, "aten.pixel_shuffle.default", "aten.pixel_unshuffle.default")
def reshape(site: Site) -> Refusal:
    """A rect must be a rect again under the other shape."""

    def refusal(part: Part) -> str:
        need = part.needs[0]
        if need is None or need.volume != part.made.volume:
            return f"{site.op.id}: {part.made} of {shape_of(site.outputs[0])} is no rect of what it reshapes"
        return ""

    return refusal


@refusal_rules.entry("aten.convolution.default")
def convolution(site: Site) -> Refusal:
    """Groups stay together; a transposed one leaves no holes between its windows."""
    channels_cut = "a part of the channels of a convolution in groups"
    holes = "its stride is larger than its kernel, so that some outputs come from no input"
    has_holes = bool(site.attributes.get("transposed")) and any(
        window.stride > window.extent for window in windows_of(site)
    )
    grouped = site.attributes.get("groups") != 1

    def refusal(part: Part) -> str:
        if grouped and _is_cut(site, part, 1):
            return f"{site.op.id} would make {channels_cut}"
        return f"{site.op.id}: {holes}" if has_holes else ""

    return refusal


@refusal_rules.entry("aten.max_pool2d_with_indices.default", "aten.max_pool3d_with_indices.default")
def max_pool(_: Site) -> Refusal:
    """Windows may be cut; padding never wins. The indices serve its own backward only."""
    return lambda part: "indices of a part point into the part" if part.output else ""


@refusal_rules.entry("aten.avg_pool2d.default", "aten.avg_pool3d.default")
def average_pool(site: Site) -> Refusal:
    """The divisor of a window at the border depends on the padding, so a part must have the same padding."""
    windows, shape = windows_of(site), shape_of(site.inputs[0])
    counts = bool(site.attributes.get("count_include_pad"))

    def refusal(part: Part) -> str:
        need = part.needs[0]
        hangs = need.overhang(shape)[-len(windows) :] if need else ()
        for (before, after), window in zip(hangs, windows, strict=False):
            if max(before, after) > window.before:
                return f"{site.op.id}: a window reaches past the padding"
            if not counts and max(0, after - before) % window.stride:
                return f"{site.op.id}: a part that begins inside would count its padding past the border"
        return ""

    return refusal


RESIZES = (
    *(f"aten.upsample_{kind}.default" for kind in ("linear1d", "bilinear2d", "trilinear3d")),
    *(
        f"aten.{kind}{n}d.default"
        for kind in ("upsample_nearest", "_upsample_nearest_exact")
        for n in (1, 2, 3)
    ),
)
"""Interpolations that are weighed dim by dim."""

PADS = tuple(f"aten.{kind}_pad{n}d.default" for kind in ("reflection", "replication") for n in (1, 2, 3))
"""Paddings with what is there already."""

refusal_rules.entry(*RESIZES, *PADS)(takes_its_part)


@refusal_rules.entry("aten.upsample_bicubic2d.default")
@refusal_rules.entry("aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool3d.default")
def spatially_whole(site: Site) -> Refusal:
    """Where an output samples depends on the size of the image: only samples may be cut apart."""

    def refusal(part: Part) -> str:
        cut = any(_is_cut(site, part, dim) for dim in range(2, part.made.ndim))
        return f"{site.op.id} looks at the size of the whole image" if cut else ""

    return refusal


@refusal_rules.entry("aten.native_batch_norm.default")
def batch_norm(site: Site) -> Refusal:
    """With fixed statistics each place is normalised alone."""
    return no_form(site) if site.attributes.get("training") else whole_dims_stay_whole(site)


@refusal_rules.entry("aten.native_group_norm.default")
def group_norm(site: Site) -> Refusal:
    """Statistics per sample: samples may be cut apart."""

    def refusal(part: Part) -> str:
        cut = any(_is_cut(site, part, dim) for dim in range(1, part.made.ndim))
        return f"{site.op.id}: group norm takes its statistics over channels and places" if cut else ""

    return refusal


CAUSAL_IN_TILES = "aten._scaled_dot_product_flash_attention_for_cpu.default"


@refusal_rules.entry(*aten.ATTENTIONS)
def attention(site: Site) -> Refusal:
    """Queries may be cut apart; with a causal mask only where a mask can express the offset."""
    row = len(shape_of(site.outputs[0])) - 2

    def refusal(part: Part) -> str:
        if part.output:
            return f"{site.op.id}: only the attended values are made in parts"
        if any(_is_cut(site, part, dim) for dim in (row + 1,)):
            return f"{site.op.id}: a part of the features"
        causal = bool(site.attributes.get("is_causal")) and _is_cut(site, part, row)
        causal &= site.op.type != CAUSAL_IN_TILES
        return f"{site.op.id}: a causal mask counts from the first query it is given" if causal else ""

    return refusal
