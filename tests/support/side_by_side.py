"""Eager and something else side by side: what differs after the same steps from the same state."""

import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn

from stowplan import Search
from stowplan.capture import capture
from stowplan.errors import BudgetTooSmall
from stowplan.run.fit import fit
from stowplan.run.measure.measure import measure
from stowplan.run.step.straight import StraightStep
from tests.support.asking import asked

Loss: TypeAlias = Callable[[object], Tensor]
Training: TypeAlias = dict[str, Tensor]


def scalar(output: object) -> Tensor:
    """The loss of a model that returns it."""
    assert isinstance(output, Tensor)
    return output


def differences(model: nn.Module, args: tuple[object, ...], loss: Loss = scalar, steps: int = 2) -> list[str]:
    """What is not the same to the bit when the plain step runs as straight-line code."""
    twin = copy.deepcopy(model)
    straight = StraightStep(capture(twin, args), twin)
    expected = trained(model, model, args, loss, steps)
    return different(expected, trained(straight, twin, args, loss, steps))


def trained(
    run: Callable[..., object],
    model: nn.Module,
    args: tuple[object, ...],
    loss: Loss = scalar,
    steps: int = 2,
) -> Training:
    """Every loss, gradient, parameter, buffer and generator state of some steps, by name and step.

    `run` is called like `model`, whose parameters it uses. Two trainings come one after the other: they share
    the generator.
    """
    return dict(_followed(run, model, args, loss, steps))


def different(expected: Training, found: Training) -> list[str]:
    """Which entries are missing on one side or not the same to the bit."""
    missing = expected.keys() ^ found.keys()
    return sorted(missing) + [
        name for name in expected if name in found and not _same(expected[name], found[name])
    ]


def _followed(
    run: Callable[..., object], model: nn.Module, args: tuple[object, ...], loss: Loss, steps: int
) -> Iterator[tuple[str, Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(7)
    for step in range(steps):
        optimizer.zero_grad()
        result = loss(run(*args))
        torch.autograd.backward(result)
        yield f"loss {step}", result.detach()
        yield f"generator {step}", torch.get_rng_state()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                yield f"gradient {step} {name}", parameter.grad.clone()
        optimizer.step()
        for name, tensor in model.state_dict().items():
            yield f"state {step} {name}", tensor.clone()


def _same(expected: Tensor, found: Tensor) -> bool:
    return torch.equal(expected, found) and expected.stride() == found.stride()


AMPLE = 1 << 40
_MOVES = 100


def smallest_budget(model: nn.Module, args: tuple[object, ...]) -> int:
    """What the refusal of a budget of one byte names."""
    try:
        fit(copy.deepcopy(model), args, budget=1, allow=["recompute"], search=Search(moves=_MOVES))
    except BudgetTooSmall as refusal:
        return refusal.minimum_bytes
    raise AssertionError("a step was fitted into one byte")


def fitted_at_both_ends(model: nn.Module, args: tuple[object, ...]) -> Iterator[tuple[int, nn.Module]]:
    """Budgets with a fitted copy of the model each."""
    for budget in (smallest_budget(model, args), AMPLE):
        yield (
            budget,
            fit(copy.deepcopy(model), args, budget=budget, allow=["recompute"], search=Search(moves=_MOVES)),
        )


def differences_at_both_ends(
    model: nn.Module, args: tuple[object, ...], loss: Loss = scalar, steps: int = 2
) -> list[str]:
    """What a fitted model leaves otherwise than eager, to the bit, after some steps from the same state."""
    eager = copy.deepcopy(model)
    expected = trained(eager, eager, args, loss, steps)
    return [
        f"{name} at {budget}"
        for budget, fitted in fitted_at_both_ends(model, args)
        for name in different(expected, trained(fitted, fitted, args, loss, steps))
    ]


def measured_peak(model: nn.Module, args: tuple[Tensor, ...], loss: Loss = scalar) -> int:
    """The most bytes at once in a second step, from fresh gradients; the first may load what kernels keep."""

    def step() -> Tensor:
        result = loss(model(*args))
        result.backward()  # type: ignore[no-untyped-call]
        return result.detach()

    step()
    model.zero_grad(set_to_none=True)
    return measure(step, before=[*model.parameters(), *model.buffers(), *args]).measured_peak_bytes


def lowest(model: nn.Module, args: tuple[object, ...], **options: Any) -> nn.Module:
    """The model where it recomputes the most, or does what else is allowed in `options`."""
    how = asked({"allow": ("recompute",), "moves": 50, **options})
    with pytest.raises(BudgetTooSmall) as refusal:
        fit(model, args, budget=1, **how)
    return fit(model, args, budget=refusal.value.minimum_bytes, **how)
