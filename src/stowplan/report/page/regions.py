"""The data of the region view: the rectangles that a worker reads and writes."""

from stowplan.ir import Document, Graph, Regions
from stowplan.report.page.columns import Columns
from stowplan.report.page.tiles import box


def regions_of(document: Document) -> Columns | None:
    """Per tensor what the worker reads and writes, per op the rectangle of each port."""
    regions = document.regions
    if regions is None:
        return None
    return {
        "tensors": _by_number(document.graph, regions),
        "ops": [
            [[port, box(rect)] for port, rect in regions.ops.get(op.id, {}).items()]
            for op in document.graph.ops
        ],
    }


def _by_number(graph: Graph, regions: Regions) -> list[Columns | None]:
    found: list[Columns | None] = []
    for name, tensor in graph.tensors.items():
        region = regions.tensors.get(name)
        found.append(
            {
                "shape": tensor.shape,
                "read": box(region.read) if region.read else None,
                "write": box(region.write) if region.write else None,
            }
            if region
            else None
        )
    return found
