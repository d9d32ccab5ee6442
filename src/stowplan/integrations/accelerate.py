"""Accelerate: a model fitted where the accelerator puts it, then prepared as usual."""

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.optim import Optimizer

from stowplan.errors import BadUse
from stowplan.request import Iteration
from stowplan.run.fit import fit


def prepare_within(
    accelerator: Accelerator,
    budget: int | str,
    model: nn.Module,
    args: tuple[object, ...],
    *others: Any,
    kwargs: Mapping[str, object] | None = None,
    optimizer: bool = False,
    clip_norm: float | None = None,
    **settings: Any,
) -> tuple[Any, ...]:
    """`accelerator.prepare(model, *others)`, the model fitted first to calls like `model(*args, **kwargs)`.

    It is planned on the accelerator's device and under its mixed precision. `settings` are those of
    `stowplan.fit`. With `optimizer` the budget is for the whole iteration: the plan has the optimizer that is
    among `others`, and the accelerator's gradient accumulation. It clips to `clip_norm`, if that is given.
    """
    if optimizer:
        accumulate = accelerator.gradient_accumulation_steps
        iteration = Iteration(_optimizer_among(others), clip_norm=clip_norm, accumulate=accumulate)
        settings["optimizer"] = iteration
    elif clip_norm is not None:
        raise BadUse("clip_norm is of an iteration; give optimizer=True too")
    model = model.to(accelerator.device)
    here, named = send_to_device((args, dict(kwargs or {})), accelerator.device)
    with accelerator.autocast():
        fitted = fit(model, here, named, budget=budget, **settings)
    prepared = accelerator.prepare(fitted, *others)
    return prepared if isinstance(prepared, tuple) else (prepared,)


def _optimizer_among(others: tuple[Any, ...]) -> Optimizer:
    found = [other for other in others if isinstance(other, Optimizer)]
    if len(found) != 1:
        raise BadUse(
            f"{len(found)} optimizers are given to prepare, and the plan has one: give it after args"
        )
    return found[0]
