"""The step with its convolutions in channels-last layout, as inductor runs them on a CPU.

oneDNN's convolutions read and write channels-last tensors directly; it copies row-major tensors to a layout
of its own and back. The step is captured again with the operands of convolutions converted. PyTorch's other
ops keep the layout, so only images, weights and the gradients of weights are converted.

Some of PyTorch's kernels are less exact in this layout: batch norm adds up all rows in float32. Ops that add
up rows are therefore left to compiled kernels, which add them in parts, and the others are compared with
themselves in the usual layout. Convolutions are not: oneDNN adds up their products in another order in each
layout, further from float64 for some results and nearer for others.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from stowplan.capture import Call, Captured, Ref
from stowplan.capture.program import filled, outputs_by_name
from stowplan.capture.stand_ins import is_permuted, same_strides, stride_of
from stowplan.errors import CaptureError, NotTileable
from stowplan.ir import Graph, Op
from stowplan.ops.effects import FUSED, RELAID, UPDATE, Effect, effect_of
from stowplan.ops.table import site_of
from stowplan.run.cost.probe import operand_of
from stowplan.run.planning.planner import Subject
from stowplan.run.planning.recapture import Replacement, check_differentiable
from stowplan.techniques.kernels.plan.fusible import FUSIBLE, POINTWISE, is_view
from stowplan.techniques.kernels.run.adopt import NO_ROOM, checked_by_ops
from stowplan.techniques.kernels.run.kernel import Kernel
from stowplan.techniques.kernels.run.known import read_finding, write_finding
from stowplan.torch_private import OpOverload
from stowplan.watch import tell_phase

aten = torch.ops.aten
_CONVOLUTION = aten.convolution.default
_LEFT_OUT = (
    FUSED,
    *map(str, (_CONVOLUTION, aten.convolution_backward.default, aten.new_empty_strided.default)),
)
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the dims of an operand
_BARRED = Effect.RANDOM | Effect.OUTSIDE


def in_channels_last(subject: Subject) -> Captured | None:
    """The step in channels-last layout, its convolutions marked; None where it would not be the same step.

    Random numbers are drawn in the order of memory, so a step that draws is not changed. Nor is a step whose
    outputs or gradients would have other strides.
    """
    captured = subject.captured
    if not _may_change(subject):
        return None
    relaid = replace(subject, replacements=_REPLACEMENTS)
    try:
        check_differentiable(captured, subject.model, subject.args, subject.kwargs)
        found = relaid.as_run()
    except (CaptureError, NotTileable):
        return None
    return replace(found, graph=_marked(found.graph)) if _returns_the_same(captured, found) else None


def _may_change(subject: Subject) -> bool:
    captured, graph = subject.captured, subject.captured.graph
    if subject.replacements or captured.answers.steps or isinstance(subject.loss, nn.Module):
        return False
    if any(op.type == UPDATE or effect_of(site_of(graph, op)) & _BARRED for op in graph.ops):
        return False
    convolutions = [op for op in graph.ops if op.type == str(_CONVOLUTION)]
    on_cpu = all(op.device == "cpu" for op in graph.ops)
    return on_cpu and any(
        len(graph.tensors[op.inputs[0].tensor].shape or ()) in _FORMATS for op in convolutions
    )


def _converted(call: Call, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A convolution of operands in channels-last layout."""
    args = [filled(value, values) for value in call.args]
    operands = [_relaid(operand) for operand in args[:2] if isinstance(operand, Tensor)]
    made = call.target(*operands, *args[2:], **{name: filled(v, values) for name, v in call.kwargs.items()})
    return outputs_by_name(call, made, ())


def _reshaped(call: Call, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A view, or a copy of what no longer can be seen so."""
    return outputs_by_name(call, aten.reshape.default(*(filled(v, values) for v in call.args)), ())


_REPLACEMENTS: Mapping[OpOverload, Replacement] = {
    _CONVOLUTION: _converted,
    aten.view.default: _reshaped,
    aten._unsafe_view.default: _reshaped,
}


def _relaid(operand: Tensor) -> Tensor:
    form = _FORMATS.get(operand.dim())
    return operand if form is None else operand.contiguous(memory_format=form)


def _returns_the_same(captured: Captured, found: Captured) -> bool:
    """Whether outputs and gradients lie as they did."""
    before, after = (
        [*(leaf.tensor for leaf in step.program.outputs if isinstance(leaf, Ref))]
        + [step.program.gradients[name] for name in captured.program.gradients]
        for step in (captured, found)
    )
    pairs = zip(before, after, strict=True)
    return all(_lie_alike(captured.graph, one, found.graph, other) for one, other in pairs)


def _lie_alike(graph: Graph, name: str, other: Graph, other_name: str) -> bool:
    one, two = graph.tensors[name], other.tensors[other_name]
    return one.shape == two.shape and same_strides(one.shape or (), stride_of(one), stride_of(two))


def _marked(graph: Graph) -> Graph:
    ops = (
        replace(op, attributes={**op.attributes, RELAID: True}) if op.type == str(_CONVOLUTION) else op
        for op in graph.ops
    )
    return replace(graph, ops=tuple(ops))


def reductions(graph: Graph) -> frozenset[str]:
    """The ops that add up rows, and can be in a compiled kernel."""
    types = FUSIBLE - POINTWISE
    return frozenset(op.id for op in graph.ops if op.type in types and _reads_permuted(graph, op))


def fault_of_layout(captured: Captured) -> str:
    """The first op that is less exact in the layout it has than in row-major layout; empty if there is none.

    What is computed element by element has the same bits, and compiled kernels were compared before.
    """
    graph, kernels = captured.graph, dict[str, Kernel]()
    for op in graph.ops:
        is_left_out = op.type in _LEFT_OUT or op.type in POINTWISE or is_view(graph, op)
        if not is_left_out and _reads_permuted(graph, op):
            kernel = _alone(captured, op)
            kernels.setdefault(kernel.name, kernel)
    for number, kernel in enumerate(kernels.values()):
        tell_phase("comparing layouts", number, len(kernels))
        if fault := _known_fault(kernel):
            return f"{kernel.calls[0].target}: {fault}"
    return ""


def _known_fault(kernel: Kernel) -> str:
    """Why an op is less exact in its layout, as it was found now or earlier."""
    name = f"layout of {kernel.name}"
    known = read_finding(name)
    if known is not None:
        return known.fault
    found = checked_by_ops(kernel)
    if found.fault != NO_ROOM:
        write_finding(name, found)
    return found.fault


def _reads_permuted(graph: Graph, op: Op) -> bool:
    """Whether an operand lies in another order than row by row."""
    operands = (graph.tensors[name] for name in op.reads())
    return any(is_permuted(operand.shape or (), stride_of(operand)) for operand in operands)


def _alone(captured: Captured, op: Op) -> Kernel:
    """One op as a kernel, to be compared."""
    tensors, call = captured.graph.tensors, captured.program.calls[op.id]
    made = [name for name in call.outputs if name is not None]
    operands = {name: operand_of(tensors[name]) for name in dict.fromkeys(op.reads())}
    return Kernel([call], operands, {name: operand_of(tensors[name]) for name in made})
