"""Writing a graph as a Chainer file. The format can carry only graphs like those its reader makes; others are
refused rather than written with a loss."""

import json
from collections.abc import Iterator
from dataclasses import fields

from stowplan.errors import BadInput, BadUse
from stowplan.formats.chainer.reader import read
from stowplan.formats.chainer.slices import format_slices
from stowplan.formats.chainer.spelling import BACKWARD
from stowplan.formats.chainer.views import SavedView
from stowplan.ir import Attributes, Graph, Kind, Op, Phase, Role, Tensor

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
    """In the file graph inputs get a gradient too: it lists what a backward could make."""
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
    """Read the file back: the one check that covers all that the format cannot say."""
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
