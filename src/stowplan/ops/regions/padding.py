"""Pads: constant ones are a shift into padding, the others read their border from inside the input."""

from stowplan.ir import Shape
from stowplan.ops.regions.maps import Bordered, Digit, Sliding
from stowplan.ops.regions.relation import DimMap, Need, Regions, Relation
from stowplan.ops.regions.rules import barrier, identity, integers, rules
from stowplan.ops.sliding import Window
from stowplan.ops.table import Site, shape_of


@rules.entry("aten.constant_pad_nd.default")
def constant_pad(site: Site) -> Regions:
    """What the pull has outside the input is the pad, of the op's value."""
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
