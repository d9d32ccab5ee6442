"""Normalisations: outputs depend on statistics over dims, and once these are known only on their own place.

The statistics are exact through merged moments, so every norm can be computed in two sweeps of tiles.
"""

from stowplan.ir import Shape
from stowplan.ops.regions.maps import Grouped, Sliding
from stowplan.ops.regions.relation import DimMap, Need, Partial, Reduction, Regions, Relation
from stowplan.ops.regions.rules import identity, integer, integers, needs_all, rules, whole
from stowplan.ops.table import Site, shape_of


def _norm(
    name: str, shape: Shape, image: tuple[DimMap, ...], rest: tuple[Need | None, ...], dims: tuple[int, ...]
) -> Relation:
    """The normalised output: `image` is what statistics over `dims` need, `rest` the other inputs."""
    after = Relation(shape, (Need(identity(shape)), *rest))
    reason = f"{name} takes its statistics over {_listed(dims)}"
    reduction = Reduction(Partial.MOMENTS, {0: dims}, after)
    return Relation(shape, (Need(image), *rest), dict.fromkeys(dims, reason), reduction)


def _listed(dims: tuple[int, ...]) -> str:
    return f"dim{'s' if len(dims) > 1 else ''} {', '.join(map(str, dims))}"


@rules.entry(
    "aten._native_batch_norm_legit_functional.default",
    "aten._native_batch_norm_legit.default",
    "aten._native_batch_norm_legit.no_stats",
    "aten._native_batch_norm_legit_no_training.default",
    "aten.native_batch_norm.default",
    "aten.cudnn_batch_norm.default",
    "aten._batch_norm_with_update_functional.default",
)
def batch_norm(site: Site) -> Regions:
    """Statistics per channel over all other dims while training, running ones else."""
    shape = shape_of(site.inputs[0])
    dims = tuple(dim for dim in range(len(shape)) if dim != 1)
    statistics = (_channel_statistics(site, position, dims) for position in range(1, len(site.outputs)))
    if "no_training" in site.op.type or site.attributes.get("training") is False:
        frozen = Relation(shape, (Need(identity(shape)), *_vectors(site, 1, *_VECTORS)))
        return Regions((frozen, *statistics))
    weights = _vectors(site, 1, "weight", "bias")
    return Regions((_norm("batch norm", shape, _channel(shape, 1), weights, dims), *statistics))


_VECTORS = ("weight", "bias", "running_mean", "running_var")


def _vectors(site: Site, dim: int, *wanted: str) -> tuple[Need | None, ...]:
    """The inputs after the image; those wanted follow output dim `dim`. A missing one is an attribute."""
    present = [name for name in _VECTORS if name not in site.attributes][: len(site.inputs) - 1]
    channels = shape_of(site.inputs[0])[1]
    return tuple(Need((Sliding(dim, channels),)) if name in wanted else None for name in present)


def _channel(shape: Shape, follows: int) -> tuple[DimMap, ...]:
    """All of the image for channels that follow output dim `follows`."""
    return (*whole(shape[:1]), Sliding(follows, shape[1]), *whole(shape[2:]))


def _channel_statistics(site: Site, output: int, dims: tuple[int, ...]) -> Relation:
    """A vector over channels: the batch's statistics, or in the last two outputs updated running ones."""
    image, shape = shape_of(site.inputs[0]), shape_of(site.outputs[output])
    if shape != image[1:2]:
        return needs_all(site, shape, f"{site.op.type} keeps its own notes in output {output}")
    from_end = output - len(site.outputs)
    running = _VECTORS[from_end:][:1] if "functional" in site.op.type and from_end >= -2 else ()
    reduction = Reduction(Partial.MOMENTS, {0: dims})
    return Relation(shape, (Need(_channel(image, 0)), *_vectors(site, 0, *running)), reduction=reduction)


@rules.entry("aten.native_group_norm.default")
def group_norm(site: Site) -> Regions:
    """Statistics per sample and group of channels, over the group and the spatial dims."""
    shape, groups = shape_of(site.inputs[0]), integer(site, "group")
    share = shape[1] // groups
    vectors = tuple(Need((Sliding(1, shape[1]),)) for _ in site.inputs[1:])
    spatial = tuple(range(2, len(shape)))
    image = (Sliding(0, shape[0]), Grouped(1, shape[1], share, share), *whole(shape[2:]))
    normalised = _norm("group norm", shape, image, vectors, (1, *spatial) if groups == 1 else spatial)
    grouped = (Sliding(0, shape[0]), Grouped(1, shape[1], 1, share), *whole(shape[2:]))
    return Regions((normalised, *_statistics(site, grouped, (1, *spatial))))


@rules.entry("aten.native_layer_norm.default", "aten._fused_rms_norm.default", "aten.rms_norm.default")
def layer_norm(site: Site) -> Regions:
    """Statistics over the last dims, as many as `normalized_shape` has."""
    shape = shape_of(site.inputs[0])
    first = len(shape) - len(integers(site, "normalized_shape"))
    weights = tuple(Need(identity(shape[first:], first)) for _ in site.inputs[1:])
    image = (*identity(shape[:first]), *whole(shape[first:]))
    name = "RMS norm" if "rms" in site.op.type else "layer norm"
    dims = tuple(range(first, len(shape)))
    return Regions((_norm(name, shape, image, weights, dims), *_statistics(site, image, dims)))


def _statistics(site: Site, image: tuple[DimMap, ...], dims: tuple[int, ...]) -> tuple[Relation, ...]:
    """The statistics a norm returns beside its output: they do not read weights."""
    rest: tuple[Need | None, ...] = (None,) * (len(site.inputs) - 1)
    reduction = Reduction(Partial.MOMENTS, {0: dims})
    return tuple(
        Relation(shape_of(output), (Need(image), *rest), reduction=reduction) for output in site.outputs[1:]
    )
