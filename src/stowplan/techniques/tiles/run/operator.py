"""Sweeps as ops of PyTorch, so that a step with sweeps is captured, priced, planned and run like any other.

An op is given the key of its sweep, which the step that runs it holds: no step sees a sweep of another. In
graphs its place is taken by the name.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stowplan.capture.program import handle_of
from stowplan.ops.table import shape_of
from stowplan.run.parts.part import empty_like_described
from stowplan.techniques.tiles.run.sweep import Sweep


def call_sweep(sweep: Sweep, inputs: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The segment's outputs, differentiable, and by name the statistics gathered on the way.

    The gradients of a loss are made with it.
    """
    statistics = _gathered(sweep, dict(zip(sweep.segment.inputs, inputs, strict=True)))
    if sweep.segment.loss is None:
        made = torch.ops.stowplan.sweep(inputs, statistics, sweep.over_inputs(), sweep.key)
    else:
        wanted = [position for position, tensor in enumerate(inputs) if tensor.requires_grad]
        made = torch.ops.stowplan.sweep_loss(inputs, statistics, wanted, sweep.key)
    return made[: len(sweep.outputs)], dict(zip(sweep.statistics, statistics, strict=True))


def _gathered(sweep: Sweep, given: Mapping[str, Tensor]) -> list[Tensor]:
    """All statistics, from a separate op: a recomputed sweep does not gather them a second time."""
    if not sweep.statistics:
        return []
    with torch.no_grad():  # the sweep itself differentiates them
        found: list[Tensor] = torch.ops.stowplan.gather([given[name] for name in sweep.looks_at], sweep.key)
    return found


def _sweep(key: str) -> Sweep:
    found = handle_of(key)
    assert isinstance(found, Sweep), f"{key} is no sweep"
    return found


# Schemas are written out: PyTorch 2.6 does not read `list[Tensor]` in a signature.
@torch.library.custom_op(
    "stowplan::gather", mutates_args=(), schema="(Tensor[] inputs, str name) -> Tensor[]"
)
def _gather(inputs: list[Tensor], name: str) -> list[Tensor]:
    return _sweep(name).gather(inputs)


@torch.library.custom_op(
    "stowplan::sweep",
    mutates_args=(),
    schema="(Tensor[] inputs, Tensor[] statistics, SymInt[] over, str name) -> Tensor[]",
)
def _forward(inputs: list[Tensor], statistics: list[Tensor], over: list[int], name: str) -> list[Tensor]:
    del over
    return _sweep(name).forward(inputs, statistics)


@torch.library.custom_op(
    "stowplan::sweep_backward",
    mutates_args=(),
    schema="(Tensor[] gradients, Tensor[] inputs, Tensor[] statistics, SymInt[] wanted, SymInt[] over,"
    " str name) -> Tensor[]",
)
def _backward(
    gradients: list[Tensor],
    inputs: list[Tensor],
    statistics: list[Tensor],
    wanted: list[int],
    over: list[int],
    name: str,
) -> list[Tensor]:
    return _sweep(name).backward(gradients, inputs, wanted, statistics, over)


# Not custom ops, for these may not return what they were given.
torch.library.define(
    "stowplan::sweep_",
    "(Tensor(a!)[] inputs, Tensor[] statistics, SymInt[] over, str name) -> Tensor(a!)[]",
)
torch.library.define(
    "stowplan::sweep_backward_",
    "(Tensor(a!)[] gradients, Tensor[] inputs, Tensor[] statistics, SymInt[] wanted, SymInt[] over, str name)"
    " -> Tensor(a!)[]",
)


@torch.library.impl("stowplan::sweep_", "default")
def _forward_in_place(
    inputs: list[Tensor], statistics: list[Tensor], over: list[int], name: str
) -> list[Tensor]:
    """Written over the inputs that `over` tells, except where that is -1."""
    return _sweep(name).forward(inputs, statistics, over)


@torch.library.impl("stowplan::sweep_backward_", "default")
def _backward_in_place(
    gradients: list[Tensor],
    inputs: list[Tensor],
    statistics: list[Tensor],
    wanted: list[int],
    over: list[int],
    name: str,
) -> list[Tensor]:
    """Written over the gradients that `over` tells, except where that is -1."""
    return _sweep(name).backward(gradients, inputs, wanted, statistics, over, in_place=True)


@torch.library.custom_op(
    "stowplan::sweep_loss",
    mutates_args=(),
    schema="(Tensor[] inputs, Tensor[] statistics, SymInt[] wanted, str name) -> Tensor[]",
)
def _loss(inputs: list[Tensor], statistics: list[Tensor], wanted: list[int], name: str) -> list[Tensor]:
    return _sweep(name).loss(inputs, wanted, statistics)


@_forward.register_fake
def _like_outputs(inputs: list[Tensor], _: list[Tensor], __: list[int], name: str) -> list[Tensor]:
    return [empty_like_described(tensor, inputs[0].device) for tensor in _sweep(name).outputs]


@_gather.register_fake
def _like_statistics(inputs: list[Tensor], name: str) -> list[Tensor]:
    return [
        torch.empty(shape, dtype=gathering.dtype, device=inputs[0].device)
        for gathering in _sweep(name).gatherings.values()
        for shape in gathering.shapes
    ]


@_backward.register_fake
def _like_wanted(
    _: list[Tensor],
    inputs: list[Tensor],
    __: list[Tensor],
    wanted: list[int],
    ___: list[int],
    ____: str,
) -> list[Tensor]:
    return [torch.empty_like(inputs[position]) for position in wanted]


@_loss.register_fake
def _like_loss(inputs: list[Tensor], _: list[Tensor], wanted: list[int], name: str) -> list[Tensor]:
    loss = empty_like_described(_sweep(name).outputs[0], inputs[0].device)
    return [loss, *(torch.empty_like(inputs[position]) for position in wanted)]


def _keep_inputs(ctx: Any, inputs: tuple[list[Tensor], list[Tensor], list[int], str], output: object) -> None:
    del output
    tensors, statistics, _, name = inputs
    ctx.sweep = _sweep(name)  # held until backward
    ctx.wanted = [position for position, tensor in enumerate(tensors) if tensor.requires_grad]
    ctx.save_for_backward(*tensors, *statistics)


def _sweep_again(
    ctx: Any, incoming: list[Tensor | None]
) -> tuple[list[Tensor | None], list[None], None, None]:
    sweep = ctx.sweep
    given = [
        torch.zeros(
            shape_of(tensor), dtype=getattr(torch, str(tensor.dtype)), device=ctx.saved_tensors[0].device
        )
        if gradient is None
        else gradient
        for gradient, tensor in zip(incoming, sweep.outputs, strict=True)
    ]
    count = len(sweep.segment.inputs)
    inputs, statistics = list(ctx.saved_tensors[:count]), list(ctx.saved_tensors[count:])
    over = sweep.over_gradients(ctx.wanted)
    found = torch.ops.stowplan.sweep_backward(given, inputs, statistics, ctx.wanted, over, ctx.sweep.key)
    return _placed(found, ctx.wanted, count), [None] * len(statistics), None, None


def _keep_gradients(
    ctx: Any, inputs: tuple[list[Tensor], list[Tensor], list[int], str], output: list[Tensor]
) -> None:
    ctx.counts, ctx.wanted = [len(inputs[0]), len(inputs[1])], inputs[2]
    ctx.save_for_backward(*output[1:])


def _rescale(ctx: Any, incoming: list[Tensor | None]) -> tuple[list[Tensor | None], list[None], None, None]:
    gradient = incoming[0]
    assert gradient is not None, "a loss that nobody differentiates"
    found = [torch.mul(saved, gradient) for saved in ctx.saved_tensors]
    inputs, statistics = ctx.counts
    return _placed(found, ctx.wanted, inputs), [None] * statistics, None, None


def _placed(found: list[Tensor], wanted: list[int], count: int) -> list[Tensor | None]:
    by_position = dict(zip(wanted, found, strict=True))
    return [by_position.get(position) for position in range(count)]


_forward.register_autograd(_sweep_again, setup_context=_keep_inputs)
_loss.register_autograd(_rescale, setup_context=_keep_gradients)
