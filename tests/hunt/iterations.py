"""Loops whose optimizer is planned with the step: `fit(..., optimizer=)`, and what comes between its parts.

Such a case is a loop of iterations: forward, backward, `optimizer.step()`, `zero_grad()`. Its actions are
entries of the table of actions, but are drawn for these cases alone, and these cases draw no others.
"""

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from .actions import Halt, drive_optimizer
from .sides import Side

_register: Callable[[Tensor, Callable[[Tensor], Tensor]], Any] = Tensor.register_hook


class Clipping(torch.optim.Optimizer):
    """Descent that clips at one norm of all gradients, as LAMB's `max_grad_norm` does."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # noqa: ARG002
        trained = _with_gradients(self)
        if trained:
            norm = torch.stack([gradient.norm() for _, gradient in trained]).norm()
            for parameter, gradient in trained:
                parameter.sub_(gradient * (50 / (norm + 1e-6)).clamp(max=1.0), alpha=0.01)


class Skipping(torch.optim.Optimizer):
    """Descent that leaves out the whole step if any gradient is not finite."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # noqa: ARG002
        trained = _with_gradients(self)
        if all(gradient.isfinite().all() for _, gradient in trained):
            for parameter, gradient in trained:
                parameter.sub_(gradient, alpha=0.01)


def _with_gradients(optimizer: torch.optim.Optimizer) -> list[tuple[Tensor, Tensor]]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]


OPTIMIZERS: Mapping[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=False),
    "adamw, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "adamw, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "clipping": Clipping,
    "skipping": Skipping,
}


def _trained(side: Side, random: Random) -> nn.Parameter:
    return random.choice([p for p in side.model.parameters() if p.requires_grad])


@drive_optimizer()
def large_gradients(side: Side, random: Random) -> None:
    side.iteration(random.randrange(1000), factor=random.choice((1e4, 1e8)))


@drive_optimizer()
def odd_gradient(side: Side, random: Random) -> None:
    """One element of one gradient is not finite, as after an overflow."""
    odd = random.choice((float("inf"), float("nan")))

    def hook(gradient: Tensor) -> Tensor:
        changed = gradient.clone()
        changed.view(-1)[:1] = odd
        return changed

    handle = _register(_trained(side, random), hook)
    try:
        side.iteration(random.randrange(1000))
    finally:
        handle.remove()


@drive_optimizer()
def other_rate(side: Side, random: Random) -> None:
    for group in side.its_optimizer().param_groups:
        group["lr"] = random.choice((0.003, 0.03))


@drive_optimizer()
def scheduled(side: Side, random: Random) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(side.its_optimizer(), 1, 0.5)
    for _ in range(2):
        side.iteration(random.randrange(1000))
        schedule.step()


@drive_optimizer()
def saved_and_loaded(side: Side, random: Random) -> None:
    """The model and its optimizer go back to before an iteration."""
    optimizer = side.its_optimizer()
    weights = {name: tensor.clone() for name, tensor in side.model.state_dict().items()}
    state = optimizer.state_dict()
    side.iteration(random.randrange(1000))
    side.model.load_state_dict(weights)
    optimizer.load_state_dict(state)


@drive_optimizer()
def frozen_for_an_iteration(side: Side, random: Random) -> None:
    parameter = _trained(side, random)
    parameter.requires_grad = False
    side.iteration(random.randrange(1000))
    parameter.requires_grad = True


@drive_optimizer()
def evaluated(side: Side, random: Random) -> None:
    with torch.no_grad():
        side.forward(side.batch(random.randrange(1000)))


@drive_optimizer()
def forward_thrown_away(side: Side, random: Random) -> None:
    side.forward(side.batch(random.randrange(1000)))


@drive_optimizer()
def smaller_batch(side: Side, random: Random) -> None:
    side.iteration(random.randrange(1000), rows=random.choice((1, 3)))


@drive_optimizer(weight=1)
def gradient_edited(side: Side, random: Random) -> None:
    """Between backward and step one gradient is dropped, scaled or clamped: refused, or as in eager."""
    parameter, what = _trained(side, random), random.choice(("drop", "scale", "clamp"))

    def edit() -> None:
        if what == "drop":
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.mul_(0.5) if what == "scale" else parameter.grad.data.clamp_(-1e-3, 1e-3)

    side.iteration(random.randrange(1000), between=edit)


@drive_optimizer(weight=1)
def clipped_between(side: Side, random: Random) -> None:
    def clip() -> None:
        nn.utils.clip_grad_norm_(side.model.parameters(), 0.01)

    side.iteration(random.randrange(1000), between=clip)


@drive_optimizer(weight=1)
def rate_set_between(side: Side, random: Random) -> None:
    def change() -> None:
        for group in side.its_optimizer().param_groups:
            group["lr"] *= 0.5

    side.iteration(random.randrange(1000), between=change)


@drive_optimizer(weight=1)
def ended_in_backward(side: Side, random: Random) -> None:
    """The hook of a parameter raises: from here on the plan may refuse, but not go on with other numbers."""

    def hook(_: Tensor) -> Tensor:
        raise Halt

    handle = _register(_trained(side, random), hook)
    try:
        side.iteration(random.randrange(1000))
    finally:
        handle.remove()
