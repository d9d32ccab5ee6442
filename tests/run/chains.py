"""A small model with a real choice between keeping and making again, and a fit of it that has to choose."""

import copy
from collections.abc import Callable

from torch import Tensor, nn

from stowplan.capture import capture
from stowplan.plan.decision import Again
from stowplan.run.fit import fit, plans_of
from stowplan.run.planning.price import planner_for_captured

MOVES = 300  # any plan will do, if it is small enough


class Chain(nn.Module):
    """Blocks of equal width, with statistics and draws in them; returns its loss."""

    def __init__(self, *, dropout: float = 0.0, norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), norm(16), nn.GELU(), nn.Dropout(dropout)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def budget_halfway(model: nn.Module, args: tuple[object, ...]) -> int:
    """Halfway between the smallest budget that is possible and what eager takes."""
    planner = planner_for_captured(capture(model, args), moves=MOVES)
    return (planner.minimum_bytes + planner.plain_peak_bytes) // 2


def fitted_copy(model: nn.Module, args: tuple[object, ...]) -> nn.Module:
    """A copy of `model` that has to make something again to stay within its budget."""
    fitted = fit(copy.deepcopy(model), args, budget=budget_halfway(model, args), moves=MOVES)
    assert all(any(isinstance(step, Again) for step in plan.steps) for plan in plans_of(fitted))
    return fitted
