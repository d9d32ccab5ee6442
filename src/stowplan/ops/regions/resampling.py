"""Interpolation: output i reads around position `scale i + offset` of the input, as ATen defines it."""

from stowplan.ir import Attribute
from stowplan.ops.regions.maps import Resized
from stowplan.ops.regions.relation import Need, Regions, Relation
from stowplan.ops.regions.rules import identity, rules
from stowplan.ops.table import Site, shape_of

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
