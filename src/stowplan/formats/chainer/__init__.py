"""Chainer's dump of one training step: variables with their bytes, then one record per function call.

    file     = header variable{N_vars} record{N_ops}    header = N_vars SP N_ops
    variable = id SP bytes SP name                      name = "_" | "/" link "/" parameter | digits (input)
    record   = ("forward"|"backward") NL n_in SP n_out NL input{n_in} output{n_out} type NL json NL
    input    = id SP tag                                tag = "_" (forward) | "gradient" | "input" | "output"
    output   = id

The i-th backward record is the adjoint of the i-th forward record. One id names a value and its gradient; in
the graph the value keeps the id ("53") and the gradient is "53.grad", a dropout mask "53.mask": no id of the
file may end like that. An op is named after its link or type and its first output: "conv_u0b_c.90",
"ReLU.99", and its adjoint "ReLU.99.backward" of type "ReLU.backward".
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields

from stowplan.errors import BadInput, BadUse
from stowplan.formats.chainer.build import SavedView, forward_ops, pairs_of, step_graph, values_of
from stowplan.formats.chainer.infer import infer_shapes
from stowplan.formats.chainer.records import BACKWARD, ChainerRecord, Listing, Tag, format_slices, parse
from stowplan.formats.checked import checked
from stowplan.ir import Attributes, Document, Graph, Kind, Note, NoteKind, Op, Phase, Role, Tensor

__all__ = ["FORMAT", "SavedView", "read", "recognise", "write"]


FORMAT = "chainer"
_BEGINNING = re.compile(r"[0-9]{1,9} [0-9]{1,9}\r?\n\S+ [0-9]+ (_|/\S+|[0-9]+)\r?\n")


def recognise(text: str) -> bool:
    """Whether a text begins with two counts and a variable."""
    return _BEGINNING.match(text) is not None


def read(text: str, saved: SavedView = SavedView.LISTED) -> Document:
    """The training step a file describes; `saved` selects the saved tensors of its backward."""
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
        what = f"masks {', '.join(masks)}: a dropout saves one, of its output's bytes, that the file omits"
        notes.append(Note(NoteKind.INFERRED, "", what))
    return notes


def _counts(listing: Listing, graph: Graph) -> dict[str, int]:
    """The figures of the file, and how far its own order is executable."""
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


def _names(record: ChainerRecord) -> list[str]:
    return [name for name, _ in record.inputs]


def _gradients(record: ChainerRecord) -> list[str]:
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


_VARIABLES = (Kind.PARAMETER, Kind.INPUT, Kind.ACTIVATION)


def write(graph: Graph) -> str:
    """The file from which `read`, in the same view of saved tensors, makes an equal graph."""
    variables = [tensor for tensor in graph.tensors.values() if tensor.kind in _VARIABLES]
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    adjoints = {op.adjoint_of: op for op in graph.ops if op.phase is Phase.BACKWARD}
    lines = [f"{len(variables)} {len(forward) + len(adjoints)}"]
    lines += [f"{tensor.id} {tensor.nbytes} {tensor.name or '_'}" for tensor in variables]
    for op in forward:
        lines += _forward_record(graph, op)
    for op in forward:
        if op.id in adjoints:
            lines += _backward_record(graph, op, adjoints[op.id])
    text = "\n".join(lines) + "\n"
    _refuse_loss(graph, text)
    return text


def _forward_record(graph: Graph, op: Op) -> Iterator[str]:
    outputs = [name for name in op.writes() if graph.tensors[name].kind is not Kind.MASK]
    return _record("forward", [f"{use.tensor} _" for use in op.inputs], outputs, op.type, op.attributes)


def _backward_record(graph: Graph, forward: Op, op: Op) -> Iterator[str]:
    """In the file, graph inputs get a gradient too: it lists what a backward could make."""
    outputs = [graph.tensors[name].gradient_of or name for name in op.writes()]
    outputs += [name for name in forward.reads() if graph.tensors[name].kind is Kind.INPUT]
    inputs = [
        _tagged(graph.tensors[use.tensor], forward)
        for use in op.inputs
        if graph.tensors[use.tensor].kind is not Kind.MASK
    ]
    return _record("backward", inputs, outputs, op.type.removesuffix(BACKWARD), op.attributes)


def _tagged(tensor: Tensor, forward: Op) -> str:
    if tensor.gradient_of is not None:
        return f"{tensor.gradient_of} gradient"
    return f"{tensor.id} {'output' if tensor.id in forward.writes() else 'input'}"


def _record(
    phase: str, inputs: list[str], outputs: list[str], function: str, attributes: Attributes
) -> Iterator[str]:
    yield from (phase, f"{len(inputs)} {len(outputs)}", *inputs, *outputs, function)
    written = {key: format_slices(value) if key == "slices" else value for key, value in attributes.items()}
    yield json.dumps(written)


def _refuse_loss(graph: Graph, text: str) -> None:
    """Read the file back: one check for everything the format cannot express."""
    keeps_less = any(use.role is Role.SHAPE for op in graph.ops for use in op.inputs)
    keeps_masks = any(tensor.kind is Kind.MASK for tensor in graph.tensors.values())
    try:
        back = read(text, SavedView.RETAIN if keeps_less or keeps_masks else SavedView.LISTED).graph
    except BadInput as error:
        raise BadUse(f"a Chainer file cannot carry this graph: {error.what}") from error
    if back != graph:
        raise BadUse(f"a Chainer file cannot carry this graph: {_first_difference(graph, back)}")


def _first_difference(graph: Graph, back: Graph) -> str:
    for name, tensor in graph.tensors.items():
        if name not in back.tensors:
            return f"tensor {name!r} would be lost"
        if back.tensors[name] != tensor:
            return f"tensor {name!r} would come back with another {_changed(tensor, back.tensors[name])}"
    for op, other in zip(graph.ops, back.ops, strict=False):
        if op != other:
            return f"op {op.id!r} would come back with another {_changed(op, other)}"
    return "it would come back with other tensors, ops or held tensors"


def _changed(one: Tensor | Op, other: Tensor | Op) -> str:
    names = (field.name for field in fields(one))
    return " and ".join(name for name in names if getattr(one, name) != getattr(other, name))
