"""Budgets below what a worker's part of the step takes as it comes: what the worker really took."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from stowplan import Search, fit, plans_of, shards_of
from stowplan.errors import BudgetTooSmall
from stowplan.run.measure.measure import measure
from stowplan.techniques.shards.plan.traffic import traffic_of
from tests.support.workers.compared import differentiate, distance

MOVES = 200
"""Of the planner: enough to get well below the plain step."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The plain peak of a worker, the budget it was given, what was projected and measured.

    `far` is how far gradients are from those of the plain step, `rounding` how far they may be with tiles.
    """

    plain_bytes: int
    allowed_bytes: int
    projected_bytes: int
    measured_bytes: int
    tiled: int  # segments
    longer: float  # times the plain step's seconds, as projected
    far: float
    rounding: float
    sent_bytes: tuple[int, int]  # measured and projected, summed ones included

    @property
    def is_kept(self) -> bool:
        """Whether the step was within a budget that the plain one was not, with the same gradients."""
        within = self.measured_bytes <= self.allowed_bytes < self.plain_bytes
        return within and self.far <= (self.rounding if self.tiled else 0.0) and self.is_sent

    @property
    def is_sent(self) -> bool:
        return self.sent_bytes[0] == self.sent_bytes[1]


class Part:
    """A worker's part of a net's step, to be run within one budget after the other."""

    def __init__(self, model: nn.Module, args: tuple[Tensor, ...], mesh: str) -> None:
        self._model, self._args, self._mesh = model, args, mesh

    def run(self, budget: int | str) -> tuple[nn.Module, int, list[Tensor]]:
        """The step within a budget, the peak that was measured, and gradients."""
        torch.manual_seed(5)
        step = fit(self._model, self._args, budget=budget, mesh=self._mesh, search=Search(moves=MOVES))
        shares, _ = shards_of(step).share(*self._args)
        self._model.zero_grad()
        torch.manual_seed(5)
        before = [*shares, *self._model.parameters(), *self._model.buffers()]
        peak = measure(partial(differentiate, step, shares), before=before).measured_peak_bytes
        return step, peak, _gradients(self._model)

    def smallest(self, allow: Sequence[str]) -> int:
        """The smallest budget that is not refused on any worker."""
        try:
            fit(self._model, self._args, budget=1, mesh=self._mesh, search=Search(moves=MOVES), allow=allow)
        except BudgetTooSmall as refused:
            return refused.minimum_bytes
        raise AssertionError("one byte is enough")


def within_budgets(part: Part, below: Sequence[float]) -> list[Taken]:
    """A worker's step half way to the smallest budget without tiles, there, and below."""
    _, plain, expected = part.run("1TiB")
    least = part.smallest(allow=["recompute"])
    budgets = ((plain + least) // 2, least, *(int(share * least) for share in below))
    return [_taken(part, budget, plain, expected) for budget in budgets]


def _taken(part: Part, budget: int, plain: int, expected: list[Tensor]) -> Taken:
    step, measured, gradients = part.run(budget)
    sharded, (plan,) = shards_of(step), plans_of(step)
    workers, traffic = sharded.workers, traffic_of(sharded.plan)[sharded.workers.rank]
    return Taken(
        plain,
        budget,
        plan.projected_peak_bytes,
        measured,
        len(plan.tile_maps),
        plan.projected_seconds / plan.plain_seconds,
        distance(gradients, expected),
        4096 * torch.finfo(expected[0].dtype).eps,
        (workers.sent_bytes + workers.summed_bytes, traffic.sent_bytes + traffic.summed_bytes),
    )


def _gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
