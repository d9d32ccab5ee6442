"""The table of region rules by op type, and the words that rules are written in."""

from collections.abc import Iterable, Sequence

from stowplan.errors import MissingRule
from stowplan.ir import Attribute, Shape
from stowplan.ops.regions.maps import Along, Always, Digit, Sliding
from stowplan.ops.regions.relation import DimMap, Need, Regions, Relation
from stowplan.ops.table import Site, Table, shape_of
from stowplan.ops.windows import Window


def barrier(site: Site, because: str = "") -> Regions:
    """The stated default: an op without a rule is computed whole, and says so."""
    reason = because or f"{site.op.type} has no region rule"
    relations = (needs_all(site, shape_of(tensor), reason) for tensor in site.outputs)
    return Regions(tuple(relations), barrier=reason)


def needs_all(site: Site, shape: Shape, reason: str) -> Relation:
    """An output of this shape that needs every input whole, however it is cut."""
    needs = tuple(Need(whole(shape_of(tensor))) for tensor in site.inputs)
    return Relation(shape, needs, dict.fromkeys(range(len(shape)), reason))


rules: Table[Regions] = Table("regions", default=barrier)


def regions_of(site: Site) -> Regions:
    """The regions of an op.

    If a rule lacks something it must know, or does not match the op's operands, the op is a barrier.
    """
    try:
        found = rules(site)
    except MissingRule as missing:
        return barrier(site, str(missing))
    return found if _fits(site, found) else barrier(site, f"{site.op.id!r} is no usual {site.op.type!r}")


def _fits(site: Site, regions: Regions) -> bool:
    """Whether regions are about all operands and results of the op, with as many dims as these have."""
    if len(regions.outputs) != len(site.outputs):
        return False
    ranks = [len(shape_of(tensor)) for tensor in site.inputs]
    for relation, made in zip(regions.outputs, site.outputs, strict=True):
        if len(relation.shape) != len(shape_of(made)) or len(relation.needs) != len(ranks):
            return False
        needed = zip(relation.needs, ranks, strict=True)
        if any(need is not None and len(need.dims) != rank for need, rank in needed):
            return False
        maps = (dim_map for need in relation.needs if need is not None for dim_map in need.dims)
        if any(_beyond(_output_dims(dim_map), len(relation.shape)) for dim_map in maps):
            return False
        reduced = relation.reduction.dims if relation.reduction else {}
        if len({len(dims) for dims in reduced.values()}) > 1:
            return False
        if any(at >= len(ranks) or _beyond(dims, ranks[at]) for at, dims in reduced.items()):
            return False
    return True


def _output_dims(dim_map: DimMap) -> tuple[int, ...]:
    match dim_map:
        case Along():
            return (dim_map.dim,)
        case Digit():
            return dim_map.dims
    return ()


def _beyond(dims: Iterable[int | None], rank: int) -> bool:
    return any(dim is not None and dim >= rank for dim in dims)


def whole(shape: Iterable[int]) -> tuple[DimMap, ...]:
    """Dims of an input that is needed whole."""
    return tuple(Always(size, (0, size)) for size in shape)


def identity(shape: Shape, first: int = 0) -> tuple[DimMap, ...]:
    """Dims of an input that follow the output dims from `first` on, index by index."""
    return tuple(Sliding(first + dim, size) for dim, size in enumerate(shape))


def along(dims: Iterable[int], sizes: Iterable[int], windows: Iterable[Window]) -> tuple[DimMap, ...]:
    """Dims of an input that windows slide over, each following its output dim."""
    return tuple(Sliding(*row) for row in zip(dims, sizes, windows, strict=True))


def broadcast(shape: Shape, output: Shape) -> tuple[DimMap, ...]:
    """Dims of an input that is broadcast from the last dim: those of size 1 serve all outputs."""
    first = len(output) - len(shape)
    return tuple(
        Sliding(first + dim, size) if size == output[first + dim] else Always(size, (0, size))
        for dim, size in enumerate(shape)
    )


def moved(site: Site, dims: Sequence[DimMap]) -> Regions:
    """One output that reads one input through `dims`; other inputs only give a shape."""
    rest = (None,) * (len(site.inputs) - 1)
    return Regions((Relation(shape_of(site.outputs[0]), (Need(tuple(dims)), *rest)),))


def dim_of(site: Site, ndim: int, key: str = "dim") -> int:
    """The attribute that names one dim, counted from the front."""
    return integer(site, key) % max(1, ndim)


def dims_of(site: Site, ndim: int, key: str = "dim") -> tuple[int, ...]:
    """The attribute that names dims, counted from the front; none named means all."""
    value = site.attributes.get(key)
    named = (value,) if isinstance(value, int) else integers(site, key) if value is not None else ()
    return tuple(sorted(dim % max(1, ndim) for dim in named)) or tuple(range(ndim))


def integer(site: Site, key: str) -> int:
    """An attribute that is an integer."""
    value = site.attributes.get(key)
    if not isinstance(value, int):
        raise _wrong(site, key, value, "an integer")
    return value


def count(site: Site, key: str) -> int:
    """An attribute that counts something there must be at least one of."""
    value = integer(site, key)
    if value < 1:
        raise _wrong(site, key, value, "a positive integer")
    return value


def integers(site: Site, key: str) -> tuple[int, ...]:
    """An attribute that is a tuple of integers."""
    value = site.attributes.get(key)
    numbers = tuple(item for item in value if isinstance(item, int)) if isinstance(value, tuple) else None
    if numbers is None or numbers != value:
        raise _wrong(site, key, value, "a tuple of integers")
    return numbers


def _wrong(site: Site, key: str, value: Attribute, expected: str) -> MissingRule:
    return MissingRule(f"regions of {site.op.id!r}: attribute {key!r} is {value!r}, not {expected}")
