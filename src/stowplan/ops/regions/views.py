"""Ops that lay the same elements out anew: reshapes, transposes, repeats, rolls, pixel shuffles."""

from collections.abc import Iterator
from math import prod

from stowplan.ir import Shape
from stowplan.ops.regions.maps import Always, Digit, Grouped, Sliding
from stowplan.ops.regions.relation import DimMap, Need, Regions, Relation
from stowplan.ops.regions.rules import (
    barrier,
    broadcast,
    dim_of,
    identity,
    integer,
    integers,
    moved,
    rules,
)
from stowplan.ops.table import Site, shape_of


@rules.entry(
    *(f"aten.{name}.default" for name in ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze")),
    "aten._reshape_alias.default",
    "aten.flatten.using_ints",
    "aten.unflatten.int",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "Reshape",
)
def reshape(site: Site) -> Regions:
    """Dims are matched from the front into groups of equal size; in a group, the flat index is the same."""
    before, after = shape_of(site.inputs[0]), shape_of(site.outputs[0])
    if 0 in before or 0 in after:
        return barrier(site, f"{site.op.type} reshapes a tensor without elements")
    dims: list[DimMap] = [Always(size, (0, size)) for size in before]
    inside: dict[int, str] = {}
    for reads, makes in _groups(before, after):
        sizes = tuple(after[dim] for dim in makes)
        below = prod(sizes)
        for dim in reads:
            below //= before[dim]
            is_same = len(reads) == len(makes) == 1
            dims[dim] = Sliding(makes[0], before[dim]) if is_same else Digit(makes, sizes, below, before[dim])
        inside |= {dim: f"a reshape lays dim {dim} inside dim {makes[0]}" for dim in makes[1:]}
    rest = (None,) * (len(site.inputs) - 1)
    return Regions((Relation(after, (Need(tuple(dims)), *rest), inside),))


def _groups(before: Shape, after: Shape) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The smallest runs of dims, leaving out those of size 1, that hold the same number of elements."""
    left = [dim for dim, size in enumerate(before) if size != 1]
    right = [dim for dim, size in enumerate(after) if size != 1]
    while left:
        reads, makes = [left.pop(0)], [right.pop(0)]
        while (have := prod(before[dim] for dim in reads)) != (want := prod(after[dim] for dim in makes)):
            (reads if have < want else makes).append((left if have < want else right).pop(0))
        yield tuple(reads), tuple(makes)


@rules.entry("aten.permute.default")
def permute(site: Site) -> Regions:
    """Output dim i is input dim dims[i]."""
    shape = shape_of(site.inputs[0])
    order = [dim % len(shape) for dim in integers(site, "dims")]
    return moved(site, [Sliding(order.index(dim), size) for dim, size in enumerate(shape)])


@rules.entry("aten.transpose.int", "aten.t.default")
def transpose(site: Site) -> Regions:
    """Two dims change places."""
    shape = shape_of(site.inputs[0])
    order = list(range(len(shape)))
    if site.op.type == "aten.t.default":
        order.reverse()
    else:
        one, other = (dim_of(site, len(shape), key) for key in ("dim0", "dim1"))
        order[one], order[other] = order[other], order[one]
    return moved(site, [Sliding(order[dim], size) for dim, size in enumerate(shape)])


_LAYOUTS = ((0, 3, 1, 2), (0, 2, 3, 1))


@rules.entry("Transpose")
def change_layout(site: Site) -> Regions:
    """TensorFlow's change between channels last and channels first; the shapes tell which."""
    shape, output = shape_of(site.inputs[0]), shape_of(site.outputs[0])
    fitting = [
        order for order in _LAYOUTS if len(shape) == 4 and output == tuple(shape[dim] for dim in order)
    ]
    if len(fitting) != 1:
        return barrier(site, f"Transpose makes {output} of {shape}, which does not tell the order of dims")
    return moved(site, [Sliding(fitting[0].index(dim), size) for dim, size in enumerate(shape)])


@rules.entry("aten.expand.default", "aten.expand_as.default", "aten.broadcast_to.default")
def expand(site: Site) -> Regions:
    """Dims of size 1 serve every output."""
    return moved(site, broadcast(shape_of(site.inputs[0]), shape_of(site.outputs[0])))


@rules.entry("aten.repeat.default")
def repeat(site: Site) -> Regions:
    """The input again and again along each dim; more repeats than dims make new dims in front."""
    shape = shape_of(site.inputs[0])
    first = len(shape_of(site.outputs[0])) - len(shape)
    return moved(site, [_turning(first + dim, size, site) for dim, size in enumerate(shape)])


@rules.entry("aten.repeat_interleave.self_int")
def repeat_elements(site: Site) -> Regions:
    """Each index of the dim several times in a row."""
    shape = shape_of(site.inputs[0])
    if site.attributes.get("dim") is None:
        return barrier(site, f"{site.op.type} without a dim flattens its input")
    dim = dim_of(site, len(shape))
    dims = list(identity(shape))
    dims[dim] = Grouped(dim, shape[dim], integer(site, "repeats"), 1)
    return moved(site, dims)


@rules.entry("aten.roll.default")
def roll(site: Site) -> Regions:
    """Indices move on by `shifts` and come in again at the front."""
    shape = shape_of(site.inputs[0])
    if not integers(site, "dims"):
        return barrier(site, f"{site.op.type} without dims flattens its input")
    dims = list(identity(shape))
    for dim, shift in zip(integers(site, "dims"), integers(site, "shifts"), strict=True):
        dims[dim % len(shape)] = _turning(dim % len(shape), shape[dim], site, -shift)
    return moved(site, dims)


def _turning(dim: int, size: int, site: Site, shift: int = 0) -> Digit:
    """An input dim that is read from the front again when the output passes its end."""
    return Digit((dim,), (shape_of(site.outputs[0])[dim],), 1, size, shift)


@rules.entry("aten.pixel_shuffle.default", "aten.pixel_unshuffle.default")
def pixel_shuffle(site: Site) -> Regions:
    """Channels become pixels, or the reverse, in blocks of `factor` by `factor`."""
    *batch, channels, height, width = shape_of(site.inputs[0])
    first = len(batch)
    grows = site.op.type == "aten.pixel_shuffle.default"
    side = integer(site, "upscale_factor" if grows else "downscale_factor")
    outer, inner = (side, 1) if grows else (1, side)
    channel = Grouped(first, channels, inner**2, outer**2)
    pixels = [Grouped(first + i, size, outer, inner) for i, size in ((1, height), (2, width))]
    return moved(site, [*identity(tuple(batch)), channel, *pixels])
