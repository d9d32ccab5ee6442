"""ONNX models: the forward half of a step, in protocol buffers that are decoded here."""

from stowplan.formats.checked import checked
from stowplan.formats.onnx.graph import graph_of
from stowplan.formats.onnx.records import parse
from stowplan.ir import Document

FORMAT = "onnx"


def recognise(data: bytes) -> bool:
    """A message whose first field is the version of ONNX's format: a small number."""
    return data[:1] == b"\x08" and len(data) > 2 and 1 <= data[1] <= 32 and data[2] & 7 in (0, 2)


def read(data: bytes) -> Document:
    """The nodes in their order, with all shapes; symbolic sizes are taken to be 1."""
    model = parse(data)
    graph, notes, where = graph_of(model)
    return Document(
        FORMAT,
        checked(graph, where, otherwise="graph"),
        notes=notes,
        counts={
            "nodes": len(model.nodes),
            "initializers": len(model.initializers),
            "inputs": len(model.inputs),
            "outputs": len(model.outputs),
        },
    )
