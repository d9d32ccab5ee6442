"""The autograd function around the two halves, and the latch that lets go of incoming gradients in time."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from stowplan.capture import Program
from stowplan.errors import BadUse
from stowplan.run.before import Before
from stowplan.run.halves import Halves

Zeros: TypeAlias = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Run:
    """One pass through the halves. `primals` are the ids of the tensors that the function is called with."""

    halves: Halves
    program: Program
    primals: tuple[str, ...]
    differentiated: tuple[bool, ...]  # by output of the source
    latched: dict[int, Tensor] = field(default_factory=dict)  # incoming gradients by output


class StepFunction(torch.autograd.Function):
    """Forward half on call, backward half on backward, each parameter's gradient returned once."""

    @staticmethod
    def forward(ctx: Any, run: Run, *primals: Tensor) -> tuple[Tensor, ...]:
        source, given = run.halves.source, dict(zip(run.primals, primals, strict=True))
        before = Before(given[name] for name in source.updated) if source.stored_bytes else None
        with before or nullcontext():
            made, saved = run.halves.forward([given[name] for name in source.forward_primals])
        outputs = tuple(map(_alone, made))
        given.update(zip(source.outputs, outputs, strict=True))
        # Autograd checks that nobody changes these meanwhile; the rest is ours alone, and ours to let go.
        ctx.save_for_backward(*(given[name] for name in source.backward_primals))
        ctx.run, ctx.saved, ctx.before = run, saved, before
        ctx.zeros = tuple(map(_zeros_for, outputs))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        if (
            torch.is_grad_enabled()
        ):  # else what is made of these gradients would be differentiated as constant
            raise BadUse(
                "create_graph=True asks for gradients that can be differentiated again; a plan has no second"
                " derivatives, so call the model that is not planned for this"
            )
        if ctx.saved is None:
            raise BadUse(
                "backward ran a second time; what it needs is freed by the first (retain_graph is not kept)"
            )
        run, saved, before = ctx.run, ctx.saved, ctx.before
        ctx.run = ctx.saved = ctx.before = None
        with before or nullcontext():
            gradients = run.halves.backward(ctx.saved_tensors, saved, _tangents(run, incoming, ctx.zeros))
        found = dict(zip(run.halves.source.gradients, gradients, strict=True))
        wanted = run.program.gradients
        return None, *(found[wanted[name]] if name in wanted else None for name in run.primals)


def _alone(output: Tensor) -> Tensor:
    """Some losses leave their sum in the block that held its terms: it would stay to the end of backward."""
    oversized = output.dim() == 0 and output.untyped_storage().nbytes() > output.element_size()
    return output.clone() if oversized and not output._is_view() else output


def _zeros_for(output: Tensor) -> Zeros:
    """Makes the gradient of an output that the loss does not depend on. Keeps nothing of it meanwhile."""
    look = output.shape, output.stride()
    return partial(torch.empty_strided, *look, dtype=output.dtype, device=output.device)


def _tangents(run: Run, incoming: tuple[Tensor | None, ...], zeros: tuple[Zeros, ...]) -> list[Tensor]:
    tangents = []
    for position, (gradient, expected) in enumerate(zip(incoming, run.differentiated, strict=True)):
        if expected and gradient is None:
            gradient = zeros[position]().zero_()
        if gradient is not None and not expected:
            raise BadUse(
                f"a gradient came in for output {position}, but the step was captured as one in which only"
                " its scalar loss is differentiated; capture it with loss= to say otherwise"
            )
        if gradient is not None:
            tangents.append(run.latched.pop(position, gradient))
    return tangents


def latch(run: Run, position: int, gradient: Tensor | None) -> Tensor | None:
    """Keep a gradient that comes in for the step, and pass one without memory in its place.

    While a function runs, autograd holds on to the gradients it calls it with. This one is the step's alone.
    """
    if gradient is None:
        return None
    run.latched[position] = gradient
    return gradient.new_empty(()).expand(gradient.shape)
