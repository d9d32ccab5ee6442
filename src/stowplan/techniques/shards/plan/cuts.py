"""Cuts: what the axes of a mesh cut of a step's inputs and weights, and all layouts that follow from it."""

from collections.abc import Sequence

from stowplan.errors import BadUse
from stowplan.ir import Graph, Kind
from stowplan.ops.table import shape_of
from stowplan.techniques.shards.plan.cells import Cells
from stowplan.techniques.shards.plan.layout import Layout
from stowplan.techniques.shards.plan.mesh import MeshAxes
from stowplan.techniques.shards.plan.propagation import (
    Chosen,
    ShardPropagation,
    check_seed,
    forward_ops,
    without_single,
)
from stowplan.techniques.shards.plan.vocabulary import weight_layouts
from stowplan.techniques.shards.plan.weights import model_axis


def propagate(
    graph: Graph, mesh: MeshAxes, seeds: Chosen, ends: Sequence[str], chosen: Chosen | None = None
) -> ShardPropagation:
    """The forward half on a mesh.

    `seeds` gives, for each input and axis, the dim that the axis cuts, or None; a `model` axis that cuts no
    input cuts weights. `ends` are what the step returns. Outputs follow the layout of their inputs, except
    where `chosen` has a layout.
    """
    axis = model_axis(mesh)
    cuts_inputs = axis is not None and any(
        dim is not None for dims in seeds.values() for dim in dims[axis : axis + 1]
    )
    layouts: dict[str, Layout] = {} if cuts_inputs else weight_layouts(graph, mesh, frozenset(ends))
    for name, tensor in graph.tensors.items():
        if name not in layouts and tensor.kind in (Kind.PARAMETER, Kind.BUFFER, Kind.CONSTANT, Kind.INPUT):
            axes = tuple(seeds.get(name, (None,) * len(mesh.axes)))
            axes = without_single(mesh, axes)
            check_seed(name, shape_of(tensor), axes, mesh)
            layouts[name] = Layout(Cells.of_shape(shape_of(tensor)), axes)
    if unknown := (chosen or {}).keys() - {op.outputs[0].tensor for op in forward_ops(graph) if op.outputs}:
        raise BadUse(f"no op makes {min(unknown)!r} first, so that its layout cannot be chosen")
    propagated = ShardPropagation(graph, mesh, layouts, chosen or {})
    propagated.run()
    return propagated
