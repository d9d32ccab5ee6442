"""Ops that read or write where another tensor points: along the indexed dim everything may be needed."""

from collections.abc import Sequence

from stowplan.ir import DType, Shape
from stowplan.ops.regions.maps import Always, Sliding
from stowplan.ops.regions.relation import DimMap, Need, Regions, Relation
from stowplan.ops.regions.rules import barrier, broadcast, dim_of, identity, rules, whole
from stowplan.ops.table import Site, shape_of


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
    """Dims that follow the output, but for one of which everything may be needed."""
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
