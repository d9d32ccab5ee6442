"""What kernels take besides operands and results, where nothing may run to find out."""

from stowplan.ir import Graph
from stowplan.ops.table import site_of
from stowplan.ops.workspace import workspace_of


def estimated_workspaces(graph: Graph) -> dict[str, int]:
    """Bytes by op id, from the table: an estimate."""
    return {op.id: workspace_of(site_of(graph, op)) for op in graph.ops}
