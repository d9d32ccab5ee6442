"""Sweeps as ops of PyTorch, so that a step with sweeps is captured, priced, planned and run like any other.

A sweep is called by its name, which determines what it computes: the same name in another process, or in the
cache of prices, means the same work.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stowplan.errors import BadUse
from stowplan.ops.table import shape_of
from stowplan.run.tiles.sweep import Sweep, empty_like_described

_SWEEPS: dict[str, Sweep] = {}


def call_sweep(sweep: Sweep, inputs: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The segment's outputs, differentiable, and by name the statistics gathered on the way.

    The gradients of a loss are made with it.
    """
    make_known(sweep)
    if sweep.segment.loss is None:
        made = torch.ops.stowplan.sweep(inputs, sweep.name)
    else:
        wanted = [position for position, tensor in enumerate(inputs) if tensor.requires_grad]
        made = torch.ops.stowplan.sweep_loss(inputs, wanted, sweep.name)
    count = len(sweep.statistics)
    statistics = [made.pop() for _ in range(count)][::-1]
    found = {name: tensor.detach() for name, tensor in zip(sweep.statistics, statistics, strict=True)}
    return made[: len(sweep.outputs)], found


def make_known(sweep: Sweep) -> None:
    """Let a sweep be called by its name."""
    _SWEEPS[sweep.name] = sweep


@contextmanager
def known_for_now(sweep: Sweep) -> Iterator[str]:
    """Let a sweep be called by its name, which is returned, and then no more."""
    _SWEEPS[sweep.name] = sweep
    try:
        yield sweep.name
    finally:
        del _SWEEPS[sweep.name]


def sweep_named(name: str) -> Sweep:
    """The sweep that was called by this name before."""
    if name not in _SWEEPS:
        raise BadUse(f"no segment {name!r} has been made in this process")
    return _SWEEPS[name]


@torch.library.custom_op("stowplan::sweep", mutates_args=())
def _forward(inputs: list[Tensor], name: str) -> list[Tensor]:
    sweep = sweep_named(name)
    statistics = sweep.gather(inputs)
    return [*sweep.forward(inputs, statistics), *statistics]


@torch.library.custom_op("stowplan::sweep_backward", mutates_args=())
def _backward(
    gradients: list[Tensor], inputs: list[Tensor], statistics: list[Tensor], wanted: list[int], name: str
) -> list[Tensor]:
    return sweep_named(name).backward(gradients, inputs, wanted, statistics)


@torch.library.custom_op("stowplan::sweep_loss", mutates_args=())
def _loss(inputs: list[Tensor], wanted: list[int], name: str) -> list[Tensor]:
    sweep = sweep_named(name)
    statistics = sweep.gather(inputs)
    return [*sweep.loss(inputs, wanted, statistics), *statistics]


@_forward.register_fake
def _like_outputs(inputs: list[Tensor], name: str) -> list[Tensor]:
    made = (empty_like_described(tensor, inputs[0].device) for tensor in sweep_named(name).outputs)
    return [*made, *_like_statistics(inputs, name)]


def _like_statistics(inputs: list[Tensor], name: str) -> list[Tensor]:
    return [
        torch.empty(shape, dtype=gathering.dtype, device=inputs[0].device)
        for gathering in sweep_named(name).gatherings.values()
        for shape in gathering.shapes
    ]


@_backward.register_fake
def _like_wanted(
    _: list[Tensor], inputs: list[Tensor], __: list[Tensor], wanted: list[int], ___: str
) -> list[Tensor]:
    return [torch.empty_like(inputs[position]) for position in wanted]


@_loss.register_fake
def _like_loss(inputs: list[Tensor], wanted: list[int], name: str) -> list[Tensor]:
    loss = empty_like_described(sweep_named(name).outputs[0], inputs[0].device)
    gradients = (torch.empty_like(inputs[position]) for position in wanted)
    return [loss, *gradients, *_like_statistics(inputs, name)]


def _keep_inputs(ctx: Any, inputs: tuple[list[Tensor], str], output: list[Tensor]) -> None:
    tensors, ctx.name = inputs
    ctx.wanted = [position for position, tensor in enumerate(tensors) if tensor.requires_grad]
    ctx.save_for_backward(*tensors, *output[len(sweep_named(ctx.name).outputs) :])


def _sweep_again(ctx: Any, incoming: list[Tensor | None]) -> tuple[list[Tensor | None], None]:
    sweep = sweep_named(ctx.name)
    given = [
        torch.zeros(
            shape_of(tensor), dtype=getattr(torch, str(tensor.dtype)), device=ctx.saved_tensors[0].device
        )
        if gradient is None
        else gradient
        for gradient, tensor in zip(incoming, sweep.outputs, strict=False)
    ]
    count = len(sweep.segment.inputs)
    inputs, statistics = list(ctx.saved_tensors[:count]), list(ctx.saved_tensors[count:])
    found = torch.ops.stowplan.sweep_backward(given, inputs, statistics, ctx.wanted, ctx.name)
    return _placed(found, ctx.wanted, count), None


def _keep_gradients(ctx: Any, inputs: tuple[list[Tensor], list[int], str], output: list[Tensor]) -> None:
    ctx.count, ctx.wanted = len(inputs[0]), inputs[1]
    ctx.save_for_backward(*output[1 : 1 + len(ctx.wanted)])


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
