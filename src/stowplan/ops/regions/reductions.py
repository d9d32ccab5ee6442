"""Ops that run over dims: sums, extrema, softmax, losses, norms. They need these dims whole, or as partials.

A norm depends on statistics over dims and, once these are known, only on its own element. Merged moments are
exact, so every norm can be computed in two passes over the tiles.
"""

from collections.abc import Mapping

from stowplan.ir import Shape
from stowplan.ops.regions.maps import Grouped, Prefix, Sliding
from stowplan.ops.regions.relation import DimMap, Need, Partial, Reduction, Regions, Relation
from stowplan.ops.regions.rules import (
    barrier,
    broadcast,
    count,
    dim_of,
    dims_of,
    identity,
    integers,
    needs_all,
    rules,
    whole,
)
from stowplan.ops.table import Site, shape_of

_PARTIALS: Mapping[str, Partial | None] = {
    "sum": Partial.SUM,
    "mean": Partial.MEAN,
    "amax": Partial.MAX,
    "amin": Partial.MIN,
    "var": Partial.MOMENTS,
    "var_mean": Partial.MOMENTS,
    "std": Partial.MOMENTS,
    "any": Partial.MAX,
    "all": Partial.MIN,
    "max": Partial.MAX,
    "min": Partial.MIN,
    "argmax": None,
    "argmin": None,
    "logsumexp": None,
    "linalg_vector_norm": None,
    "prod": None,
}


@rules.entry(
    *(f"aten.{name}.default" for name in _PARTIALS),
    *(f"aten.{name}.dim" for name in ("mean", "any", "all", "max", "min")),
    *(f"aten.{name}.dims" for name in ("any", "all")),
    *(f"aten.{name}.correction" for name in ("var", "var_mean", "std")),
    "aten.sum.dim_IntList",
    "aten.prod.dim_int",
)
def reduce(site: Site) -> Regions:
    """Runs over the dims named, or all; the rest follow the output."""
    shape, output = shape_of(site.inputs[0]), shape_of(site.outputs[0])
    dims = dims_of(site, len(shape))
    name = site.op.type.split(".")[1]
    partial = _PARTIALS[name] if len(site.outputs) == 1 or name == "var_mean" else None
    relation = _reduced(shape, output, dims, partial)
    return Regions((relation,) * len(site.outputs))


def _reduced(shape: Shape, output: Shape, dims: tuple[int, ...], partial: Partial | None) -> Relation:
    """An output with the kept dims, with or without a 1 in place of each reduced one."""
    keeps = len(output) == len(shape)
    kept = [dim for dim in range(len(shape)) if keeps or dim not in dims]
    needs = (
        whole([size])[0] if dim in dims else Sliding(kept.index(dim), size) for dim, size in enumerate(shape)
    )
    reduction = Reduction(partial, {0: dims}) if partial is not None and dims else None
    return Relation(output, (Need(tuple(needs)),), reduction=reduction)


@rules.entry("Reduce")
def megengine_reduce(site: Site) -> Regions:
    """Dims whose size changes to 1 are reduced; a second input only gives the shape."""
    shape, output = shape_of(site.inputs[0]), shape_of(site.outputs[0])
    if len(shape) != len(output):
        return barrier(site, "Reduce changes the number of dims")
    dims = tuple(dim for dim, sizes in enumerate(zip(shape, output, strict=True)) if len(set(sizes)) > 1)
    modes = {"SUM": Partial.SUM, "MEAN": Partial.MEAN, "MAX": Partial.MAX, "MIN": Partial.MIN}
    relation = _reduced(shape, output, dims, modes.get(str(site.attributes.get("mode"))))
    nothing = (None,) * (len(site.inputs) - 1)
    first = Relation(output, (*relation.needs, *nothing), reduction=relation.reduction)
    scratch = (Relation(shape_of(tensor), (None, *nothing)) for tensor in site.outputs[1:])
    return Regions((first, *scratch))


@rules.entry(
    *(f"aten.{name}.default" for name in ("_softmax", "_log_softmax", "_safe_softmax")),
    *(f"aten.{name}.int" for name in ("softmax", "log_softmax")),
)
def softmax(site: Site) -> Regions:
    """Each output reads its whole line along the dim."""
    shape = shape_of(site.outputs[0])
    dim = dim_of(site, len(shape))
    dims = list(identity(shape))
    dims[dim : dim + 1] = whole(shape[dim : dim + 1])
    reason = {dim: f"{_spoken(site)} runs over dim {dim}"} if shape else {}
    return Regions((Relation(shape, (Need(tuple(dims)),), reason),))


@rules.entry("LRN")
def local_response_norm(site: Site) -> Regions:
    """TensorFlow's runs over neighbouring channels, which are the last dim."""
    shape = shape_of(site.outputs[0])
    need = Need((*identity(shape[:-1]), *whole(shape[-1:])))
    last = len(shape) - 1
    return Regions((Relation(shape, (need,), {last: f"LRN runs over dim {last}"}),))


@rules.entry("softmax")
def drawn_softmax(site: Site) -> Regions:
    """Scores [n, classes, 1, 1] and labels make probabilities, and a loss over all of them."""
    scores, labels = (shape_of(tensor) for tensor in site.inputs)
    line = Need((*identity(scores[:1]), *whole(scores[1:2]), *identity(scores[2:], 2)))
    probability = Relation(scores, (line, None), {1: "softmax runs over dim 1"})
    loss = Relation(shape_of(site.outputs[1]), (Need(whole(scores)), Need(whole(labels))))
    return Regions((probability, loss))


@rules.entry("aten.cumsum.default", "aten.cumprod.default", "aten.logcumsumexp.default")
def running(site: Site) -> Regions:
    """Each output reads its line up to its own place."""
    shape = shape_of(site.outputs[0])
    dims: list[DimMap] = list(identity(shape))
    for dim in [dim_of(site, len(shape))][: len(shape)]:
        dims[dim] = Prefix(dim, shape[dim])
    return Regions((Relation(shape, (Need(tuple(dims)),)),))


_REDUCED_LOSSES = {1: Partial.MEAN, 2: Partial.SUM}  # ATen's numbers for reduction="mean" and "sum"


@rules.entry(
    *(f"aten.{name}_loss.default" for name in ("mse", "l1", "smooth_l1", "huber", "soft_margin")),
    "aten.binary_cross_entropy.default",
    "aten.binary_cross_entropy_with_logits.default",
    "aten.kl_div.default",
)
def pointwise_loss(site: Site) -> Regions:
    """A loss per element, then a mean or sum of all, or nothing."""
    output, shape = shape_of(site.outputs[0]), shape_of(site.inputs[0])
    partial = _REDUCED_LOSSES.get(_reduction_of(site))
    if partial is None:
        needs = tuple(Need(broadcast(shape_of(tensor), output)) for tensor in site.inputs)
        return Regions((Relation(output, needs),))
    dims = {index: _own_dims(shape_of(tensor), shape) for index, tensor in enumerate(site.inputs)}
    needs = tuple(Need(whole(shape_of(tensor))) for tensor in site.inputs)
    return Regions((Relation(output, needs, reduction=Reduction(partial, dims)),))


def _own_dims(shape: Shape, full: Shape) -> tuple[int | None, ...]:
    """Which dim of a tensor broadcast from the last dim is each dim of `full`; None where it is spread."""
    first = len(full) - len(shape)
    return tuple(
        dim - first if dim >= first and shape[dim - first] == size else None for dim, size in enumerate(full)
    )


@rules.entry(
    "aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default", "aten.cross_entropy_loss.default"
)
def class_loss(site: Site) -> Regions:
    """A loss per label over the class dim, then a weighted mean or sum of all, or nothing."""
    scores, labels = (shape_of(tensor) for tensor in site.inputs[:2])
    if len(scores) < 2 or len(labels) != len(scores) - 1:
        return barrier(site, f"{site.op.type} reads scores {scores} with labels {labels}")
    return _class_loss(site, _REDUCED_LOSSES.get(_reduction_of(site)))


@rules.entry("SoftmaxCrossEntropy")
def chainer_cross_entropy(site: Site) -> Regions:
    """Scores [n, classes, ...] and labels [n, ...]; the mean over labels that are not ignored."""
    return _class_loss(site, Partial.MEAN if site.attributes.get("reduce") == "mean" else None)


def _class_loss(site: Site, partial: Partial | None) -> Regions:
    scores, labels = (shape_of(tensor) for tensor in site.inputs[:2])
    rest = tuple(Need(whole(shape_of(tensor))) for tensor in site.inputs[2:])
    outputs = [shape_of(tensor) for tensor in site.outputs]
    if partial is None:
        per_label = (Sliding(0, scores[0]), *whole(scores[1:2]), *identity(scores[2:], 1))
        first = Relation(outputs[0], (Need(per_label), Need(identity(labels)), *rest))
        everything = Relation((), (Need(whole(scores)), Need(whole(labels)), *rest))
        return Regions((first, *(everything for _ in outputs[1:])))
    dims = {0: (0, *range(2, len(scores))), 1: tuple(range(len(labels)))}
    needs = (Need(whole(scores)), Need(whole(labels)), *rest)
    return Regions(tuple(Relation(shape, needs, reduction=Reduction(partial, dims)) for shape in outputs))


def _reduction_of(site: Site) -> int:
    value = site.attributes.get("reduction")
    return value if isinstance(value, int) else 0


def _spoken(site: Site) -> str:
    """The op's name as a word of a sentence: softmax, log softmax."""
    return site.op.type.split(".")[1].strip("_").replace("_", " ")


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
    shape, groups = shape_of(site.inputs[0]), count(site, "group")
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
    """The statistics that a norm returns after its output: they do not read weights."""
    rest: tuple[Need | None, ...] = (None,) * (len(site.inputs) - 1)
    reduction = Reduction(Partial.MOMENTS, {0: dims})
    return tuple(
        Relation(shape_of(output), (Need(image), *rest), reduction=reduction) for output in site.outputs[1:]
    )
