"""Which weights a `model` axis cuts: around hidden dims, and those of a vocabulary.

The columns of a product are cut if all that follows can be computed from parts of them. The search goes
forward from the product, and the rules of propagation decide at each op that reads a part:

    pointwise, reshape, slice of positions   makes its part
    softmax, log softmax                     makes its part, with the greatest value and a sum of all workers
    loss over classes, sum, mean             ends there: parts are summed over the workers
    anything else                            would gather the columns, so that they are left whole

These are the head of a language model and its loss. What the caller gets is left whole. A table that a lookup
picks rows of is cut by rows if it is the head's weight too, or if it is longer than the rows that are picked:
workers then sum what they have picked in place of gathering the table.
"""

from math import prod

from stowplan.errors import TooManyWorkers
from stowplan.ir import Graph, Kind, Op
from stowplan.ops.table import shape_of
from stowplan.techniques.shards.plan.cells import Cells
from stowplan.techniques.shards.plan.layout import Layout
from stowplan.techniques.shards.plan.mesh import Axis, MeshAxes
from stowplan.techniques.shards.plan.propagation import (
    LOOKUPS,
    TOGETHER,
    ShardingKind,
    ShardPropagation,
    forward_ops,
)
from stowplan.techniques.shards.plan.weights import MODEL, Cut, WeightSearch, is_plain_product, model_axis

_SUMS_OF_A_LOOKUP = 2  # a sum sends what it adds up twice, where a gather sends the table once


def weight_layouts(graph: Graph, mesh: MeshAxes, ends: frozenset[str] = frozenset()) -> dict[str, Layout]:
    """By parameter that the `model` axis of a mesh cuts, its layout; none without such an axis.

    `ends` are what the step returns.
    """
    number = model_axis(mesh)
    if number is None:
        return {}
    axis = mesh.axes[number]
    search = WeightSearch(graph, axis.size)
    search.around_hidden_dims()
    for op in forward_ops(graph):
        if is_plain_product(op):
            found = search.columns(op)
            if found and search.cut.keys().isdisjoint(found) and _ends_in_sums(graph, axis, op, ends):
                search.cut.update(found)
    search.cut.update(_tables(search, axis, mesh))
    if not search.cut:
        raise TooManyWorkers(
            f"mesh axis {MODEL!r} finds nothing to cut into {axis.size} parts: no two linear layers have so"
            " wide a hidden dim, or as many heads, between them, and no loss has as many classes; give it"
            " fewer workers"
        )
    return search.layouts(mesh, number)


def _ends_in_sums(graph: Graph, axis: Axis, product: Op, ends: frozenset[str]) -> bool:
    """Whether all that follows a product is computed from parts of its columns."""
    alone = MeshAxes((axis,))
    made = product.outputs[0].tensor
    layouts = {made: Layout(Cells.of_shape(shape_of(graph.tensors[made])), (1,))}
    found = ShardPropagation(graph, alone, layouts, {})
    cut = {made}
    for op in forward_ops(graph):
        if cut.isdisjoint(op.reads()):
            continue
        for name in op.reads():
            layouts.setdefault(name, Layout.everywhere(shape_of(graph.tensors[name]), alone))
        found.take(op)
        sharding = found.shardings[-1]
        is_cut = [not layouts[name].is_everywhere for name in op.writes()]
        if sharding.gathered or (sharding.kind is ShardingKind.PARTS and not all(is_cut)):
            return False
        if sharding.kind in TOGETHER and sharding.op.type in LOOKUPS:
            return False
        cut.update(name for name, own in zip(op.writes(), is_cut, strict=True) if own)
    return cut.isdisjoint(ends)


def _tables(search: WeightSearch, axis: Axis, mesh: MeshAxes) -> dict[str, Cut]:
    """The tables of lookups that are cut by rows, beside those that are weights of a head."""
    graph, lookups = search.graph, dict[str, list[Op]]()
    for op in forward_ops(graph):
        for name in op.reads():
            if graph.tensors[name].kind is Kind.PARAMETER and name not in search.cut:
                lookups.setdefault(name, []).append(op)
    divided = _made_from_inputs(graph)
    found = {}
    for name, ops in lookups.items():
        if all(op.type in LOOKUPS and op.inputs[0].tensor == name for op in ops):
            rows = shape_of(graph.tensors[name])[0]
            picked = sum(_picked(graph, op, divided, mesh.size // axis.size) for op in ops)
            if rows >= axis.size and rows > _SUMS_OF_A_LOOKUP * picked:
                found[name] = Cut(0, (rows,))
    return found


def _picked(graph: Graph, lookup: Op, divided: frozenset[str], others: int) -> float:
    """The rows that a worker picks; `others` are the workers that inputs are divided over."""
    name = lookup.inputs[1].tensor
    return prod(shape_of(graph.tensors[name])) / (others if name in divided else 1)


def _made_from_inputs(graph: Graph) -> frozenset[str]:
    found = {name for name, tensor in graph.tensors.items() if tensor.kind is Kind.INPUT}
    for op in forward_ops(graph):
        if not found.isdisjoint(op.reads()):
            found.update(op.writes())
    return frozenset(found)
