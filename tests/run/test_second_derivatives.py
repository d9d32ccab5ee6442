"""Backward with `create_graph=True` through a fitted module: run without a plan where the budget has room."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stowplan
from stowplan import Search
from stowplan.errors import BadUse
from stowplan.run.measure.measure import measure
from stowplan.run.second_derivatives import second_bytes

pytestmark = pytest.mark.torch


def critic(dropout: float = 0.0, *, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=not norm),
        nn.BatchNorm2d(8) if norm else nn.Identity(),
        nn.LeakyReLU(0.2),
        nn.Dropout(dropout),
        nn.Conv2d(8, 16, 3, 2, 1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(256, 1),
    )


def images() -> Tensor:
    return torch.randn(4, 3, 16, 16)


def fitted(model: nn.Module, budget: int | str = "1GiB", *, wants: bool = True) -> Any:
    given = images().requires_grad_(wants)
    return stowplan.fit(
        model, (given,), budget=budget, outputs="all", search=Search(moves=1), allow=("recompute",)
    )


def gradient_penalty(model: Any) -> Tensor:
    """WGAN-GP."""
    real, fake, share = images(), images(), torch.rand(4, 1, 1, 1)
    between = (share * real + (1 - share) * fake).requires_grad_()
    scores = model(between)
    (slopes,) = torch.autograd.grad(
        scores, between, torch.ones_like(scores), create_graph=True, retain_graph=True, only_inputs=True
    )
    penalty = (slopes.reshape(4, -1).norm(2, dim=1) - 1).square().mean()
    loss: Tensor = model(fake).mean() - model(real).mean() + 10 * penalty
    return loss


def r1(model: Any) -> Tensor:
    """StyleGAN's."""
    real = images().requires_grad_()
    scores = model(real)
    (slopes,) = torch.autograd.grad(outputs=[scores.sum()], inputs=[real], create_graph=True)
    loss: Tensor = F.softplus(-scores).mean() + slopes.square().sum([1, 2, 3]).mean()
    return loss


def outcome(model: Any, loss_of: Callable[[Any], Tensor], seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    loss = loss_of(model)
    torch.autograd.backward(loss)
    gradients = [p.grad.clone() for p in model.parameters()]
    return [loss.detach(), *gradients, *(b.clone() for b in model.buffers()), torch.get_rng_state()]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_gradient_penalty_has_eagers_bits(dropout: float, caplog: pytest.LogCaptureFixture) -> None:
    model = critic(dropout)
    run = fitted(deepcopy(model), wants=False)
    for seed in range(3):
        eager = outcome(model, gradient_penalty, seed)
        assert all(map(torch.equal, eager, outcome(run, gradient_penalty, seed)))
    assert len(stowplan.plans_of(run)) == 2
    assert sum("asks for second derivatives" in text for text in caplog.messages) == 1


@pytest.mark.parametrize("norm", [False, True])
def test_r1_has_eagers_bits_after_its_first_call(norm: bool) -> None:
    model = critic(norm=norm).double()
    torch.set_default_dtype(torch.float64)
    try:
        run = fitted(deepcopy(model))
        first = zip(outcome(model, r1, 0), outcome(run, r1, 0), strict=True)
        assert all(torch.allclose(one, other, rtol=1e-10, atol=1e-12) for one, other in first)
        assert all(map(torch.equal, outcome(model, r1, 1), outcome(run, r1, 1)))
    finally:
        torch.set_default_dtype(torch.float32)


def test_without_room_backward_is_refused_before_it_begins() -> None:
    with pytest.raises(stowplan.BudgetTooSmall) as refusal:
        fitted(critic(), 1000)
    smallest = refusal.value.minimum_bytes
    run = fitted(critic(), smallest)
    with pytest.raises(BadUse, match="allowed: give fit that much") as refused:
        r1(run)
    assert "no second derivatives" in str(refused.value)
    assert all(parameter.grad is None for parameter in run.parameters())
    captured = run.__dict__["_fitting"].planned[0].step.captured
    roomy = fitted(critic(), second_bytes(captured))
    outcome(roomy, r1, 0)


def test_it_takes_no_more_than_was_said() -> None:
    run = fitted(critic())
    captured = run.__dict__["_fitting"].planned[0].step.captured
    for _ in range(2):  # in the first call the planned forward waits too
        run.zero_grad(set_to_none=True)
        found = measure(lambda: torch.autograd.backward(r1(run)), before=[*run.parameters(), *run.buffers()])
        assert found.measured_peak_bytes <= second_bytes(captured)


class Remembering(nn.Module):
    """Its result depends on a buffer that it changes."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x.mean((2, 3))) - self.mean
        self.mean += 1
        return h.tanh()


def test_a_run_that_is_another_is_refused() -> None:
    run = fitted(Remembering())
    with pytest.raises(BadUse, match="a second run makes another result"):
        r1(run)
    assert torch.equal(run.mean, torch.ones(3))


def test_a_model_that_was_changed_meanwhile_is_refused() -> None:
    run = fitted(critic())
    real = images().requires_grad_()
    scores = run(real)
    with torch.no_grad():
        next(run.parameters()).mul_(2)
    with pytest.raises(BadUse, match="changed since forward"):
        torch.autograd.grad(scores.sum(), real, create_graph=True)
