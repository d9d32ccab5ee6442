"""Products of matrices, and attention: rows and columns follow the output, what is summed over does not."""

from stowplan.ir import Shape
from stowplan.ops.regions.maps import Always, Grouped, Prefix, Sliding
from stowplan.ops.regions.relation import DimMap, Need, Partial, Reduction, Regions, Relation
from stowplan.ops.regions.rules import barrier, broadcast, needs_all, rules, whole
from stowplan.ops.table import Site, shape_of


@rules.entry("aten.mm.default", "aten.bmm.default", "aten.matmul.default")
def product(site: Site) -> Regions:
    """[.., m, k] by [.., k, n]; the products of tiles of k add up."""
    left, right = (shape_of(tensor) for tensor in site.inputs)
    if min(len(left), len(right)) < 2:
        return barrier(site, f"{site.op.type} multiplies by a vector")
    output = shape_of(site.outputs[0])
    split = Reduction(Partial.SUM, {0: (len(left) - 1,), 1: (len(right) - 2,)})
    return Regions((Relation(output, _factors(left, right, output), reduction=split),))


@rules.entry("aten.addmm.default", "aten.baddbmm.default")
def product_plus(site: Site) -> Regions:
    """A product plus something broadcast to it."""
    added, left, right = (shape_of(tensor) for tensor in site.inputs)
    output = shape_of(site.outputs[0])
    return Regions((Relation(output, (Need(broadcast(added, output)), *_factors(left, right, output))),))


@rules.entry("MatrixMul")
def megengine_product(site: Site) -> Regions:
    """Either matrix may be read transposed."""
    left, right = (_turned(site, key, index) for index, key in enumerate(("transposeA", "transposeB")))
    output = shape_of(site.outputs[0])
    nothing: tuple[Need | None, ...] = (None,) * len(site.inputs)
    scratch = (Relation(shape_of(tensor), nothing) for tensor in site.outputs[1:])
    return Regions((Relation(output, (left, right)), *scratch))


def _turned(site: Site, key: str, index: int) -> Need:
    """The left (0) or right (1) matrix: one dim follows the output, the other is summed over."""
    shape = shape_of(site.inputs[index])
    is_turned = bool(site.attributes.get(key))
    kept = index != is_turned
    dims: list[DimMap] = list(whole(shape))
    dims[kept] = Sliding(index, shape[kept])
    return Need(tuple(dims))


@rules.entry("aten.linear.default")
def linear(site: Site) -> Regions:
    """[.., in] by a weight [out, in], plus a bias [out]."""
    shape, weight = shape_of(site.inputs[0]), shape_of(site.inputs[1])
    output = shape_of(site.outputs[0])
    last = len(output) - 1
    rows = (*broadcast(shape[:-1], output[:-1]), *whole(shape[-1:]))
    bias = [Need((Sliding(last, weight[0]),)) for _ in site.inputs[2:]]
    needs = (Need(rows), Need((Sliding(last, weight[0]), *whole(weight[1:]))), *bias)
    return Regions((Relation(output, needs),))


@rules.entry("linear")
def drawn_linear(site: Site) -> Regions:
    """[n, ...] by weights [out, ...]: everything but the batch is summed over."""
    shape, weight = (shape_of(tensor) for tensor in site.inputs)
    sample = Need((Sliding(0, shape[0]), *whole(shape[1:])))
    row = Need((Sliding(1, weight[0]), *whole(weight[1:])))
    return Regions((Relation(shape_of(site.outputs[0]), (sample, row)),))


def _factors(left: Shape, right: Shape, output: Shape) -> tuple[Need, Need]:
    """Batch dims broadcast, rows and columns follow the last two dims, what is summed over is whole."""
    rows, columns = len(output) - 2, len(output) - 1
    return (
        Need((*broadcast(left[:-2], output[:-2]), Sliding(rows, left[-2]), *whole(left[-1:]))),
        Need((*broadcast(right[:-2], output[:-2]), *whole(right[-2:-1]), Sliding(columns, right[-1]))),
    )


_FUSED = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")


@rules.entry(
    "aten.scaled_dot_product_attention.default",
    *(f"aten._scaled_dot_product_{name}.default" for name in _FUSED),
)
def attention(site: Site) -> Regions:
    """Each query reads all keys and values, or with a causal mask those up to its own place."""
    output = shape_of(site.outputs[0])
    query, key, value, *masks = _attended(site, output)
    relations = [Relation(output, (query, key, value, *masks))]
    for tensor in site.outputs[1:]:
        shape = shape_of(tensor)
        if shape == output[:-1]:  # the logarithm of each query's sum
            relations.append(Relation(shape, (query, key, None, *masks)))
        else:
            relations.append(needs_all(site, shape, f"{site.op.type} has no rule for this output"))
    return Regions(tuple(relations))


def _attended(site: Site, output: Shape) -> tuple[Need, ...]:
    """Query, key, value and, where there is one, the mask [.., queries, keys]."""
    query, key, value, *masks = (shape_of(tensor) for tensor in site.inputs)
    row, column = len(output) - 2, len(output) - 1
    is_causal = bool(site.attributes.get("is_causal"))
    keys = Prefix(row, key[-2]) if is_causal else Always(key[-2], (0, key[-2]))
    return (
        Need((*_heads(query, output), Sliding(row, query[-2]), *whole(query[-1:]))),
        Need((*_heads(key, output), keys, *whole(key[-1:]))),
        Need((*_heads(value, output), keys, Sliding(column, value[-1]))),
        *(Need((*broadcast(mask[:-1], output[:-1]), *whole(mask[-1:]))) for mask in masks),
    )


def _heads(shape: Shape, output: Shape) -> tuple[DimMap, ...]:
    """Batch and head dims; several query heads may share one head of keys and values."""
    return tuple(Grouped(dim, size, output[dim] // size, 1) for dim, size in enumerate(shape[:-2]))
