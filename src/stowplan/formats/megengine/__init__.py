"""MegEngine's profile of one run, in JSON: ops, vars with their addresses, times on two clocks."""

from stowplan.formats.checked import checked
from stowplan.formats.megengine.graph import allocation_of, counts_of, graph_of, profile_of
from stowplan.formats.megengine.records import parse
from stowplan.ir import Document

FORMAT = "megengine"


def recognise(text: str) -> bool:
    """A JSON object that opens with one of the dump's two sections."""
    head = text[:1024].lstrip()
    return head.startswith("{") and ('"profiler"' in head or '"graph_exec"' in head)


def read(text: str) -> Document:
    """The executed ops in their order, with times, addresses and footprints."""
    dump = parse(text)
    graph, notes = graph_of(dump)
    places = {op.id: f"graph_exec.operator.{op.id}" for op in graph.ops}
    return Document(
        FORMAT,
        checked(graph, places, otherwise="graph_exec"),
        profile_of(dump),
        allocation_of(dump),
        notes=notes,
        counts=counts_of(dump),
    )
