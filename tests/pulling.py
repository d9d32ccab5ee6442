"""Region rules applied back through a whole graph."""

from stowplan.geometry import Rect
from stowplan.ir import Graph, Phase
from stowplan.ops.regions import regions_of
from stowplan.ops.table import site_of


def pulled(graph: Graph, tensor: str, rect: Rect) -> dict[str, Rect]:
    """What a rect of `tensor` needs of every tensor before it; a fork takes the hull of its readers."""
    needed = {tensor: rect}
    for op in reversed([op for op in graph.ops if op.phase is Phase.FORWARD]):
        site = site_of(graph, op)
        for use, relation in zip(op.outputs, regions_of(site).outputs, strict=True):
            if use.tensor not in needed:
                continue
            for source, part in zip(site.inputs, relation.pull(needed[use.tensor]), strict=True):
                if part is not None:
                    needed[source.id] = part.hull(needed.get(source.id, part))
    return needed
