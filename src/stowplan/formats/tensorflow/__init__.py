"""TensorFlow's table of one training step: a row per node, kernel and copy, with shapes but without edges.

    row = name {", " in} ", " out ", " device ", " number
    in  = shape | "(1)" | "(no input)" | "^" control source        shape = "(" [type SP] n {"x" n} ")"
    out = shape | "(no output)" | "(output " n " bytes)"

A row "node:Kernel" gives the op type of its node. Tensors and ops are named like their rows. `forward.py` and
`wiring.py` rebuild the producers from TensorFlow's naming rules and from what its ops compute.
"""

import re

from stowplan.formats.checked import checked
from stowplan.formats.tensorflow.build import graph_of, is_consistent, unknown_input, unresolved, with_layouts
from stowplan.formats.tensorflow.forward import is_backward
from stowplan.formats.tensorflow.rows import RowKind, RowListing, copied_by, parse
from stowplan.formats.tensorflow.wiring import ForwardPart, Wiring, wire
from stowplan.ir import Document, Note, NoteKind

__all__ = ["FORMAT", "read", "recognise"]


FORMAT = "tensorflow"
_SHAPE = r"\((?:[a-z0-9]+ )?[0-9x]+\)"
_FIELD = rf"(?:{_SHAPE}|\(no (?:in|out)put\)|\(output [0-9]+ bytes\)|\^[^\s,]+)"
_BEGINNING = re.compile(rf"[^\s,()^]+(?:, {_FIELD}){{2,32}}, [^\s,()]+, [0-9]+\r?(?:\n|$)")


def recognise(text: str) -> bool:
    """Whether a text begins with a row: name, inputs, output, device, number."""
    return _BEGINNING.match(text) is not None


def read(text: str) -> Document:
    """The training step that a table describes."""
    listing = parse(text)
    wiring = wire(listing)
    where = {name: f"line {row.line}" for name, row in listing.rows.items()}
    graph = checked(with_layouts(graph_of(listing, wiring)), where, otherwise="line 1")
    notes = (*_edge_notes(listing, wiring), *_copy_notes(listing))
    return Document(FORMAT, graph, notes=notes, counts=_counts(listing, wiring))


def _counts(listing: RowListing, wiring: Wiring) -> dict[str, int]:
    """The rows of each kind, and how many of the rebuilt edges have the shape that the reading row shows."""
    pairs = [
        (edge, wanted)
        for name, edges in wiring.edges.items()
        for edge, wanted in zip(edges, listing.rows[name].inputs, strict=True)
    ]
    return {
        **listing.counts(),
        "edges": len(pairs),
        "edges_consistent": sum(is_consistent(listing, edge, wanted) for edge, wanted in pairs),
        "control_edges": sum(len(row.controls) for row in listing.rows.values()),
        "copied_bytes": sum(row.copied_bytes or 0 for row in listing.rows.values()),
    }


def _edge_notes(listing: RowListing, wiring: Wiring) -> list[Note]:
    notes = [
        Note(
            NoteKind.INFERRED, "", "producers of all inputs, and the order of the ops, from names and shapes"
        )
    ]
    for adjoint in wiring.adjoints.values():
        for operand, value in zip(adjoint.rule.operands, adjoint.values, strict=True):
            if operand.part is ForwardPart.GRADIENT and value is not None and not is_backward(value):
                what = (
                    f"the gradient of {value!r} is read as {value!r} itself, as for a loss of half its square"
                )
                notes.append(Note(NoteKind.INFERRED, f"line {listing.rows[adjoint.name].line}", what))
    for row, position, _ in unresolved(listing, wiring):
        what = f"no row is known to make input {position}; {unknown_input(row, position)!r} represents it"
        notes.append(Note(NoteKind.ODD, f"line {row.line}", what))
    return notes


def _copy_notes(listing: RowListing) -> list[Note]:
    """A copy's byte count proves the element type, or contradicts it."""
    notes = []
    for row in listing.of_kind(RowKind.MEMCPY):
        source = listing.rows[copied_by(row)].output
        if source is not None and source.nbytes != row.copied_bytes:
            what = f"{row.copied_bytes} bytes are copied of a value that has {source.nbytes}"
            notes.append(Note(NoteKind.ODD, f"line {row.line}", what))
    return notes
