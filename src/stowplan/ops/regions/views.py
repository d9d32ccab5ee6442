"""Ops that move elements: reshapes, transposes, repeats, slices, concatenations, indexing."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod

from stowplan.ir import Attribute, DType, Shape
from stowplan.ops.regions.maps import Always, Digit, Grouped, Sliding
from stowplan.ops.regions.relation import DimMap, Need, Regions, Relation
from stowplan.ops.regions.rules import (
    barrier,
    broadcast,
    count,
    dim_of,
    identity,
    integer,
    integers,
    moved,
    rules,
    whole,
)
from stowplan.ops.table import Site, shape_of
from stowplan.ops.windows import Window


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
    dims[dim] = Grouped(dim, shape[dim], count(site, "repeats"), 1)
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
    side = count(site, "upscale_factor" if grows else "downscale_factor")
    outer, inner = (side, 1) if grows else (1, side)
    channel = Grouped(first, channels, inner**2, outer**2)
    pixels = [Grouped(first + i, size, outer, inner) for i, size in ((1, height), (2, width))]
    return moved(site, [*identity(tuple(batch)), channel, *pixels])


@rules.entry("aten.slice.Tensor")
def strided_slice(site: Site) -> Regions:
    """Every `step`-th index from `start`."""
    shape = shape_of(site.inputs[0])
    dim = dim_of(site, len(shape))
    start = _from_front(site.attributes.get("start"), shape[dim])
    dims = list(identity(shape))
    dims[dim] = Sliding(dim, shape[dim], Window(stride=integer(site, "step"), before=-start))
    return moved(site, dims)


def _from_front(index: Attribute, size: int) -> int:
    """A slice's start, counted from the front and inside the tensor."""
    start = index if isinstance(index, int) else 0
    return min(max(0, start + size if start < 0 else start), size)


@rules.entry("aten.select.int")
def select(site: Site) -> Regions:
    """One index of a dim, which the output does not have."""
    size = shape_of(site.inputs[0])[dim_of(site, len(shape_of(site.inputs[0])))]
    return moved(site, _selected(site, integer(site, "index") % size))


@rules.entry("aten.unbind.int")
def unbind(site: Site) -> Regions:
    """Output k is index k of the dim."""
    relations = (
        Relation(shape_of(output), (Need(tuple(_selected(site, index))),))
        for index, output in enumerate(site.outputs)
    )
    return Regions(tuple(relations))


def _selected(site: Site, index: int) -> list[DimMap]:
    shape = shape_of(site.inputs[0])
    dim = dim_of(site, len(shape))
    dims = list(identity(shape[:dim]))
    return [*dims, Always(shape[dim], (index, index + 1)), *identity(shape[dim + 1 :], dim)]


@rules.entry("GetItem")
def basic_index(site: Site) -> Regions:
    """Chainer's index: one slice of step 1 or more, or integer, per dim from the front."""
    shape, indices = shape_of(site.inputs[0]), site.attributes.get("slices")
    if not isinstance(indices, tuple) or not all(map(_is_plain, indices)):
        return barrier(site, f"GetItem has the index {indices!r}, which is not slices and integers")
    dims: list[DimMap] = []
    follows = 0
    for index, size in zip((*indices, *[(None, None, None)] * len(shape)), shape, strict=False):
        if isinstance(index, int):
            dims.append(Always(size, (index % size, index % size + 1)))
            continue
        start, step = _start_and_step(index, size)
        dims.append(Sliding(follows, size, Window(stride=step, before=-start)))
        follows += 1
    return moved(site, dims)


def _is_plain(index: Attribute) -> bool:
    if isinstance(index, tuple):
        return len(index) == 3 and (index[2] is None or (isinstance(index[2], int) and index[2] > 0))
    return isinstance(index, int)


def _start_and_step(index: Attribute, size: int) -> tuple[int, int]:
    start, _, step = index if isinstance(index, tuple) else (None, None, None)
    return _from_front(start, size), step if isinstance(step, int) else 1


@rules.entry("aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default")
def split(site: Site) -> Regions:
    """Output k starts where the outputs before it end."""
    shape = shape_of(site.inputs[0])
    dim = dim_of(site, len(shape))
    starts = accumulate((shape_of(output)[dim] for output in site.outputs), initial=0)
    relations = []
    for start, output in zip(starts, site.outputs, strict=False):
        dims = list(identity(shape))
        dims[dim] = Sliding(dim, shape[dim], Window(before=-start))
        relations.append(Relation(shape_of(output), (Need(tuple(dims)),)))
    return Regions(tuple(relations))


@rules.entry("aten.cat.default", "Concat")
def concatenate(site: Site) -> Regions:
    """Each input serves its own stretch of the dim."""
    output = shape_of(site.outputs[0])
    dim = dim_of(site, len(output), "axis" if site.op.type == "Concat" else "dim")
    needs: list[Need | None] = []
    start = 0
    for tensor in site.inputs:
        shape = shape_of(tensor)
        if len(shape) != len(output):  # ATen lets an empty vector join anything
            needs.append(None)
            continue
        dims = list(identity(shape))
        dims[dim] = Sliding(dim, shape[dim], Window(before=start))
        needs.append(Need(tuple(dims), within=(dim, (start, start + shape[dim]))))
        start += shape[dim]
    return Regions((Relation(output, tuple(needs)),))


@rules.entry("aten.stack.default")
def stack(site: Site) -> Regions:
    """Input k serves index k of a new dim."""
    output = shape_of(site.outputs[0])
    dim = dim_of(site, len(output))
    needs = (
        Need(
            (*identity(shape[:dim]), *identity(shape[dim:], dim + 1)),
            within=(dim, (index, index + 1)),
        )
        for index, shape in enumerate(map(shape_of, site.inputs))
    )
    return Regions((Relation(output, tuple(needs)),))


@rules.entry("aten.embedding.default")
def embedding(site: Site) -> Regions:
    """Any row of the table may be asked for; columns follow the last dim."""
    table, indices = (shape_of(tensor) for tensor in site.inputs)
    rows = Need((*whole(table[:1]), Sliding(len(indices), table[1])))
    return Regions((Relation(shape_of(site.outputs[0]), (rows, Need(identity(indices)))),))


@rules.entry("aten.index_select.default")
def index_select(site: Site) -> Regions:
    """The index is a vector along the dim."""
    shape, _ = (shape_of(tensor) for tensor in site.inputs)
    dim = dim_of(site, len(shape))
    index = Need(identity(shape_of(site.inputs[1]), dim))
    return Regions((Relation(shape_of(site.outputs[0]), (Need(_open(shape, dim)), index)),))


@rules.entry("aten.gather.default")
def gather(site: Site) -> Regions:
    """The index has the output's shape, and points along one dim."""
    shape, index = (shape_of(tensor) for tensor in site.inputs)
    needs = (Need(_open(shape, dim_of(site, len(shape)))), Need(identity(index)))
    return Regions((Relation(shape_of(site.outputs[0]), needs),))


@rules.entry(
    "aten.scatter.value",
    "aten.scatter.src",
    "aten.scatter_add.default",
)
def scatter(site: Site) -> Regions:
    """Any entry of the index along the dim may write to an output."""
    shape, *writers = (shape_of(tensor) for tensor in site.inputs)
    dim = dim_of(site, len(shape))
    return _written(site, [_clipped(writer, dim, shape) for writer in writers])


@rules.entry("aten.index_copy.default", "aten.index_add.default")
def index_copy(site: Site) -> Regions:
    """The index is a vector along the dim: any entry may write to an output."""
    shape, index, source = (shape_of(tensor) for tensor in site.inputs)
    return _written(site, [whole(index), _open(source, dim_of(site, len(shape)))])


def _written(site: Site, writers: Sequence[tuple[DimMap, ...]]) -> Regions:
    """The first input in place, and whatever may be written over it."""
    output = shape_of(site.outputs[0])
    return Regions((Relation(output, (Need(identity(output)), *map(Need, writers))),))


def _open(shape: Shape, dim: int) -> tuple[DimMap, ...]:
    """Dims that follow the output, except one that may be needed whole."""
    return (*identity(shape[:dim]), *whole(shape[dim : dim + 1]), *identity(shape[dim + 1 :], dim + 1))


def _clipped(shape: Shape, dim: int, output: Shape) -> tuple[DimMap, ...]:
    """As `_open`; a dim shorter than the output's is needed whole."""
    return tuple(
        Sliding(at, size) if at != dim and size == output[at] else Always(size, (0, size))
        for at, size in enumerate(shape)
    )


@rules.entry("aten.index.Tensor", "aten._unsafe_index.Tensor")
def advanced_index(site: Site) -> Regions:
    """Index tensors, broadcast to a block, replace the dims they point along; other dims are followed."""
    shape, *pointers = (shape_of(tensor) for tensor in site.inputs)
    if any(tensor.dtype is DType.BOOL for tensor in site.inputs[1:]):
        return barrier(site, f"{site.op.type} picks elements by a mask")
    pointed = _pointed(site)
    output = shape_of(site.outputs[0])
    block = len(output) - len(shape) + len(pointed)
    is_adjacent = pointed[-1] - pointed[0] == len(pointed) - 1
    first = pointed[0] if is_adjacent else 0
    free = iter((*range(first), *range(first + block, len(output))))
    dims = (
        whole([size])[0] if dim in pointed else Sliding(next(free), size) for dim, size in enumerate(shape)
    )
    indices = (Need(broadcast(pointer, output[: first + block])) for pointer in pointers)
    return Regions((Relation(output, (Need(tuple(dims)), *indices)),))


def _pointed(site: Site) -> tuple[int, ...]:
    """The dims that have an index tensor; without gaps in the list, the first ones."""
    listed = site.attributes.get("indices")
    places = listed if isinstance(listed, tuple) else range(len(site.inputs) - 1)
    return tuple(dim for dim, place in enumerate(places) if place is not None)
