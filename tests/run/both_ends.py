"""A step fitted at its smallest budget and at one that holds everything: both must train as eager does."""

import copy
from collections.abc import Iterator

from side_by_side import Loss, different, scalar, trained
from torch import Tensor, nn

from stowplan.errors import BudgetTooSmall
from stowplan.run.fit import fit
from stowplan.run.measure.measure import measure

AMPLE = 1 << 40
_MOVES = 100


def smallest_budget(model: nn.Module, args: tuple[object, ...]) -> int:
    """What the refusal of a budget of one byte names."""
    try:
        fit(copy.deepcopy(model), args, budget=1, allow=["recompute"], moves=_MOVES)
    except BudgetTooSmall as refusal:
        return refusal.minimum_bytes
    raise AssertionError("a step was fitted into one byte")


def fitted_at_both_ends(model: nn.Module, args: tuple[object, ...]) -> Iterator[tuple[int, nn.Module]]:
    """Budgets with a fitted copy of the model each."""
    for budget in (smallest_budget(model, args), AMPLE):
        yield budget, fit(copy.deepcopy(model), args, budget=budget, allow=["recompute"], moves=_MOVES)


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
