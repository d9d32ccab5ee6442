"""Ops that take parts of a tensor or put parts together: slices, selections, splits, concatenations."""

from itertools import accumulate

from stowplan.ir import Attribute
from stowplan.ops.regions.maps import Always, Sliding
from stowplan.ops.regions.relation import DimMap, Need, Regions, Relation
from stowplan.ops.regions.rules import barrier, dim_of, identity, integer, moved, rules
from stowplan.ops.sliding import Window
from stowplan.ops.table import Site, shape_of


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
