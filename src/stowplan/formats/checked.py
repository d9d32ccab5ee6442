"""A reader's last step: a graph that breaks a rule is refused at the place in the file it came from."""

from collections.abc import Mapping

from stowplan.errors import BadInput
from stowplan.ir import Graph
from stowplan.ir.spec import RULES


def checked(graph: Graph, where: Mapping[str, str], otherwise: str) -> Graph:
    """`graph` itself if it is legal. `where` says by op id where in the file an op was written."""
    for rule in RULES:
        for fault in rule(graph):
            op = None if fault.op is None else graph.ops[fault.op].id
            raise BadInput(fault.what, where=where.get(op or "", otherwise))
    return graph
