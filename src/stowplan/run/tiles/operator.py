"""Sweeps as ops of PyTorch, so that a step with sweeps is captured, priced, planned and run like any other.

A sweep is called by its name, which determines what it computes: the same name in another process, or in the
cache of prices, means the same work.
"""

from typing import Any

import torch
from torch import Tensor

from stowplan.errors import BadUse
from stowplan.ops.table import shape_of
from stowplan.run.tiles.sweep import Sweep, empty_like_described

_SWEEPS: dict[str, Sweep] = {}


def call_sweep(sweep: Sweep, inputs: list[Tensor]) -> list[Tensor]:
    """The segment's outputs, differentiable; the gradients of a loss are made with it."""
    _SWEEPS[sweep.name] = sweep
    if sweep.segment.loss is None:
        return torch.ops.stowplan.sweep(inputs, sweep.name)  # type: ignore[no-any-return]
    wanted = [position for position, tensor in enumerate(inputs) if tensor.requires_grad]
    loss, *_ = torch.ops.stowplan.sweep_loss(inputs, wanted, sweep.name)
    return [loss]


def sweep_named(name: str) -> Sweep:
    """The sweep that was called by this name before."""
    if name not in _SWEEPS:
        raise BadUse(f"no segment {name!r} has been made in this process")
    return _SWEEPS[name]


@torch.library.custom_op("stowplan::sweep", mutates_args=())
def _forward(inputs: list[Tensor], name: str) -> list[Tensor]:
    return sweep_named(name).forward(inputs)


@torch.library.custom_op("stowplan::sweep_backward", mutates_args=())
def _backward(gradients: list[Tensor], inputs: list[Tensor], wanted: list[int], name: str) -> list[Tensor]:
    return sweep_named(name).backward(gradients, inputs, wanted)


@torch.library.custom_op("stowplan::sweep_loss", mutates_args=())
def _loss(inputs: list[Tensor], wanted: list[int], name: str) -> list[Tensor]:
    return sweep_named(name).loss(inputs, wanted)


@_forward.register_fake
def _like_outputs(inputs: list[Tensor], name: str) -> list[Tensor]:
    return [empty_like_described(tensor, inputs[0].device) for tensor in sweep_named(name).outputs]


@_backward.register_fake
def _like_wanted(_: list[Tensor], inputs: list[Tensor], wanted: list[int], __: str) -> list[Tensor]:
    return [torch.empty_like(inputs[position]) for position in wanted]


@_loss.register_fake
def _like_loss(inputs: list[Tensor], wanted: list[int], name: str) -> list[Tensor]:
    return [*_like_outputs(inputs, name), *(torch.empty_like(inputs[position]) for position in wanted)]


def _keep_inputs(ctx: Any, inputs: tuple[list[Tensor], str], output: list[Tensor]) -> None:
    del output  # PyTorch passes it by name
    tensors, ctx.name = inputs
    ctx.wanted = [position for position, tensor in enumerate(tensors) if tensor.requires_grad]
    ctx.save_for_backward(*tensors)


def _sweep_again(ctx: Any, incoming: list[Tensor | None]) -> tuple[list[Tensor | None], None]:
    outputs = sweep_named(ctx.name).outputs
    given = [
        torch.zeros(shape_of(tensor), dtype=getattr(torch, str(tensor.dtype)))
        if gradient is None
        else gradient
        for gradient, tensor in zip(incoming, outputs, strict=True)
    ]
    inputs = list(ctx.saved_tensors)
    found = torch.ops.stowplan.sweep_backward(given, inputs, ctx.wanted, ctx.name)
    return _placed(found, ctx.wanted, len(inputs)), None


def _keep_gradients(ctx: Any, inputs: tuple[list[Tensor], list[int], str], output: list[Tensor]) -> None:
    ctx.count, ctx.wanted = len(inputs[0]), inputs[1]
    ctx.save_for_backward(*output[1:])


def _rescale(ctx: Any, incoming: list[Tensor | None]) -> tuple[list[Tensor | None], None, None]:
    gradient = incoming[0]
    assert gradient is not None, "a loss that nobody differentiates"
    found = [torch.mul(saved, gradient) for saved in ctx.saved_tensors]
    return _placed(found, ctx.wanted, ctx.count), None, None


def _placed(found: list[Tensor], wanted: list[int], count: int) -> list[Tensor | None]:
    by_position = dict(zip(wanted, found, strict=True))
    return [by_position.get(position) for position in range(count)]


_forward.register_autograd(_sweep_again, setup_context=_keep_inputs)
_loss.register_autograd(_rescale, setup_context=_keep_gradients)
