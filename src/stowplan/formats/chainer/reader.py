"""Reading: lines to records, records to a graph, bytes to shapes, and an account of what was inferred."""

import re
from collections import Counter

from stowplan.formats.chainer.build import forward_ops, pairs_of, step_graph, values_of
from stowplan.formats.chainer.infer import infer_shapes
from stowplan.formats.chainer.records import Listing, Record, Tag, parse
from stowplan.formats.chainer.views import SavedView
from stowplan.formats.checked import checked
from stowplan.ir import Document, Graph, Kind, Note, NoteKind, Role

FORMAT = "chainer"
_BEGINNING = re.compile(r"[0-9]{1,9} [0-9]{1,9}\r?\n\S+ [0-9]+ (_|/\S+|[0-9]+)\r?\n")


def recognise(text: str) -> bool:
    """Whether a text begins with two counts and a variable."""
    return _BEGINNING.match(text) is not None


def read(text: str, saved: SavedView = SavedView.LISTED) -> Document:
    """The training step a file describes; `saved` chooses what its backward keeps."""
    listing = parse(text)
    forward = forward_ops(listing)
    lines = {name: f"line {variable.line}" for name, variable in listing.variables.items()}
    lines |= {op.id: f"line {record.line}" for op, record in forward}
    values, notes = infer_shapes(values_of(listing), [op for op, _ in forward], lines)
    graph, where = step_graph(listing, forward, values, saved)
    checked(graph, where, otherwise="line 1")
    return Document(FORMAT, graph, notes=(*notes, *_notes_on(graph)), counts=_counts(listing, graph))


def _notes_on(graph: Graph) -> list[Note]:
    notes = [Note(NoteKind.INFERRED, "", "ops run in order of rank, the backward half from the highest down")]
    masks = [tensor.id for tensor in graph.tensors.values() if tensor.kind is Kind.MASK]
    if masks:
        what = f"masks {', '.join(masks)}: a dropout keeps one, of its output's bytes, that no file shows"
        notes.append(Note(NoteKind.INFERRED, "", what))
    return notes


def _counts(listing: Listing, graph: Graph) -> dict[str, int]:
    """The figures of the file: what it lists, and how much of its own order could be executed."""
    tags = Counter(tag for record in listing.backward for _, tag in record.inputs)
    accumulated = {use.tensor for op in graph.ops for use in op.outputs if use.role is Role.ACCUMULATE}
    return {
        "variables": len(listing.variables),
        "shapes": sum(graph.tensors[name].shape is not None for name in listing.variables),
        "records": len(listing.forward) + len(listing.backward),
        "adjoint_pairs": len(pairs_of(listing)),
        "forward_inputs": sum(len(record.inputs) for record in listing.forward),
        "forward_outputs": sum(len(record.outputs) for record in listing.forward),
        "backward_inputs": sum(len(record.inputs) for record in listing.backward),
        "backward_outputs": sum(len(record.outputs) for record in listing.backward),
        **{f"backward_{tag}_tags": tags[tag] for tag in (Tag.GRADIENT, Tag.INPUT, Tag.OUTPUT)},
        "gradients_with_two_producers": len(accumulated),
        **_order_counts("forward", [(_names(record), record.outputs) for record in listing.forward]),
        **_order_counts("backward", [(_gradients(record), record.outputs) for record in listing.backward]),
    }


def _names(record: Record) -> list[str]:
    return [name for name, _ in record.inputs]


def _gradients(record: Record) -> list[str]:
    return [name for name, tag in record.inputs if tag is Tag.GRADIENT]


def _order_counts(half: str, records: list[tuple[list[str], tuple[str, ...]]]) -> dict[str, int]:
    """How many producer-to-reader edges one half has, and in how many the file lists the reader first."""
    producers: dict[str, list[int]] = {}
    for position, (_, outputs) in enumerate(records):
        for name in outputs:
            producers.setdefault(name, []).append(position)
    edges = [
        (producer, reader)
        for reader, (inputs, _) in enumerate(records)
        for name in inputs
        for producer in producers.get(name, ())
    ]
    violated = sum(producer > reader for producer, reader in edges)
    return {f"{half}_edges": len(edges), f"{half}_edges_out_of_file_order": violated}
