"""Segments run whole and in tiles, side by side."""

from ast import literal_eval
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from stowplan.capture import Argument, Captured, Ref, capture
from stowplan.errors import NotTileable
from stowplan.ir import Kind, Phase, validate
from stowplan.ir import Tensor as Described
from stowplan.ops.table import shape_of
from stowplan.run.step.straight import StraightStep
from stowplan.techniques.tiles.plan.borders import in_tiling_order
from stowplan.techniques.tiles.plan.rects import cut_tensors
from stowplan.techniques.tiles.plan.segment import Segment, segment_of
from stowplan.techniques.tiles.run.insertions import capture_with_sweeps
from stowplan.techniques.tiles.run.sweep import Sweep


def stretch(captured: Captured, first: str | None = None, last: str | None = None) -> Segment:
    """The forward ops from `first` to `last`, both included; all of them where not told."""
    names = [op.id for op in captured.graph.ops if op.phase is Phase.FORWARD]
    start = 0 if first is None else names.index(first)
    stop = len(names) if last is None else names.index(last) + 1
    return segment_of(captured.graph, names[start:stop])


def in_order(captured: Captured) -> Captured:
    """The step in the order that suits tiles."""
    return replace(captured, graph=validate(in_tiling_order(captured.graph)))


def sweeps_of(captured: Captured, stretches: Iterable[tuple[str, ...]], most: int = 2) -> list[Sweep]:
    """All stretches that can be cut, in so many parts along their last dims."""
    found = []
    for ops in stretches:
        try:
            segment = segment_of(captured.graph, ops)
            shape = shape_of(captured.graph.tensors[cut_tensors(segment)[0]])
            parts = (1, 1, *(min(most, size) for size in shape[2:]))
            found.append(Sweep(segment, captured.program.calls, parts))
        except NotTileable:
            continue
    return found


@dataclass(frozen=True, slots=True)
class Made:
    """Outputs, or the loss, and the gradients of all inputs that can have one."""

    outputs: list[Tensor]
    gradients: list[Tensor]


def random_inputs(segment: Segment, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Something for every input, positive for the sake of roots; integers are 0 or 1."""
    torch.manual_seed(seed)
    described = [segment.graph.tensors[name] for name in segment.inputs]
    return [
        laid_out(signed(torch.randn(t.shape or (), dtype=dtype), t), t.layout)
        if getattr(torch, str(t.dtype)).is_floating_point
        else torch.randint(0, 2, t.shape or (), dtype=getattr(torch, str(t.dtype)))
        for t in described
    ]


def signed(tensor: Tensor, described: Described) -> Tensor:
    """Parameters of both signs and not too large, everything else positive."""
    scaled = tensor / (1 + max(0, tensor.dim() - 1))
    return scaled if described.kind is Kind.PARAMETER else scaled.abs() + 0.1


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same contents in the layout that a step has them in."""
    if not layout:
        return tensor
    stride: tuple[int, ...] = literal_eval(layout)
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, stride, strict=True))
    return torch.zeros(extent, dtype=tensor.dtype).as_strided(tensor.shape, stride).copy_(tensor)


def incoming_for(segment: Segment, dtype: torch.dtype) -> list[Tensor]:
    """The same gradients for the outputs in every dtype."""
    torch.manual_seed(1)
    shapes = (segment.graph.tensors[name].shape for name in segment.outputs)
    return [torch.randn(shape or ()).to(dtype) for shape in shapes]


def in_tiles(sweep: Sweep, inputs: Sequence[Tensor], dtype: torch.dtype) -> Made:
    """By the sweep."""
    wanted = [position for position, tensor in enumerate(inputs) if tensor.is_floating_point()]
    given = dict(zip(sweep.segment.inputs, inputs, strict=True))
    statistics = sweep.gather([given[name] for name in sweep.looks_at])
    if sweep.segment.loss is not None:
        loss, *gradients = sweep.loss(inputs, wanted, statistics)
        return Made([loss], gradients)
    incoming = incoming_for(sweep.segment, dtype)
    outputs = sweep.forward(inputs, statistics)
    return Made(outputs, sweep.backward(incoming, inputs, wanted, statistics))


def whole(captured: Captured, segment: Segment, inputs: Sequence[Tensor], dtype: torch.dtype) -> Made:
    """By the captured calls, differentiated by autograd."""
    leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in inputs]
    values = _buffers(segment, dtype) | dict(zip(segment.inputs, leaves, strict=True))
    for op in segment.ops:
        call = captured.program.calls[op.id]
        args = [_filled(value, values) for value in call.args]
        made = call.target(*args, **{n: _filled(v, values) for n, v in call.kwargs.items()})
        results = [made] if call.single else made
        values |= {n: t for n, t in zip(call.outputs, results, strict=True) if n is not None}
    outputs = [values[name] for name in segment.outputs]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    incoming = [torch.ones_like(outputs[0])] if segment.loss else incoming_for(segment, dtype)
    gradients = torch.autograd.grad(outputs, wanted, incoming, allow_unused=True, materialize_grads=True)
    return Made([output.detach() for output in outputs], list(gradients))


def _buffers(segment: Segment, dtype: torch.dtype) -> dict[str, Tensor]:
    """Something for the buffers that the ops of a segment update: what they hold plays no part in it."""
    tensors = segment.graph.tensors
    read = (tensors[name] for op in segment.ops for name in op.reads())
    return {t.id: torch.zeros(t.shape or (), dtype=dtype) for t in read if t.kind is Kind.BUFFER}


def _filled(value: Argument, values: Mapping[str, Tensor]) -> object:
    if isinstance(value, Ref):
        return values[value.tensor]
    return [_filled(item, values) for item in value] if isinstance(value, tuple) else value


def relative_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest distance of a tensor to what it should be, by the norm of that.

    One that should be zero, such as the gradient of a bias before a norm, is nothing but rounding: it is
    measured by the largest.
    """
    assert len(found) == len(expected)
    norms = [float(tensor.double().norm()) for tensor in expected]
    zero = 1e-11 * max(norms, default=0.0)
    return max(
        float((a.double() - b.double()).norm()) / max(norm if norm > zero else max(norms), 1e-30)
        for a, b, norm in zip(found, expected, norms, strict=True)
    )


def errors_in_float32(
    captured: Captured, segment: Segment, parts: Sequence[int], offset: float = 0.0
) -> tuple[float, float]:
    """Of tiles and of eager against float64, summed over some draws; images are moved by the offset."""
    erred = eagers = 0.0
    for seed in range(6):
        drawn = zip(segment.inputs, random_inputs(segment, torch.float32, seed), strict=True)
        moved = {name for name in segment.inputs if offset and segment.graph.tensors[name].kind is Kind.INPUT}
        inputs = [tensor + offset if name in moved else tensor for name, tensor in drawn]
        exact = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]
        truth = whole(captured, segment, exact, torch.float64)
        eager = whole(captured, segment, inputs, torch.float32)
        found = in_tiles(Sweep(segment, captured.program.calls, parts), inputs, torch.float32)
        true = [*truth.outputs, *truth.gradients]
        eagers += relative_error([*eager.outputs, *eager.gradients], true)
        erred += relative_error([*found.outputs, *found.gradients], true)
    return erred, eagers


def error_in_tiles(captured: Captured, segment: Segment, parts: Sequence[int]) -> float:
    """How far a sweep is from the whole, in float64: outputs and gradients."""
    inputs = random_inputs(segment, torch.float64)
    expected = whole(captured, segment, inputs, torch.float64)
    found = in_tiles(Sweep(segment, captured.program.calls, parts), inputs, torch.float64)
    return max(
        relative_error(found.outputs, expected.outputs), relative_error(found.gradients, expected.gradients)
    )


def step_in_tiles(
    model: nn.Module, args: tuple[object, ...], *cuts: tuple[str | None, str | None, tuple[int, ...]]
) -> StraightStep:
    """The training step with sweeps over these stretches, each (first op, last op, parts)."""
    captured = capture(model, args)
    sweeps = [
        Sweep(stretch(captured, first, last), captured.program.calls, parts) for first, last, parts in cuts
    ]
    return StraightStep(capture_with_sweeps(captured, model, args, sweeps=sweeps), model)


def gradients_of(run: object, model: nn.Module, args: tuple[object, ...]) -> tuple[Tensor, list[Tensor]]:
    """Loss and parameter gradients of one step from a fixed state of the generator."""
    assert callable(run)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    loss = run(*args)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]
