"""Budgets below what a worker's part of the step takes as it comes: what each worker really took."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.nets import NETS
from benchmarks.results import Study
from benchmarks.shards.memory import MEMORY, differentiate
from benchmarks.shards.processes import on_workers
from stowplan import fit, plans_of, shards_of
from stowplan.errors import BudgetTooSmall
from stowplan.run.measure import measure

MOVES = 200
"""Of the planner: enough to get well below the plain step."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The plain peak of a worker, the budget it was given, and what was projected and measured."""

    plain_bytes: int
    allowed_bytes: int
    projected_bytes: int
    measured_bytes: int
    same_gradients: bool

    @property
    def is_kept(self) -> bool:
        """Whether the step was within a budget that the plain one was not."""
        return self.measured_bytes <= self.allowed_bytes < self.plain_bytes and self.same_gradients


class Part:
    """A worker's part of a net's step, to be run within one budget after the other."""

    def __init__(self, net: str, size: Any, settings: dict[str, Any], mesh: str) -> None:
        self._model, self._args = NETS[net].build(size, **settings)
        self._mesh = mesh

    def run(self, budget: int | str) -> tuple[nn.Module, int, list[Tensor]]:
        """The step within a budget, the peak that was measured, and gradients."""
        torch.manual_seed(5)
        step = fit(self._model, self._args, budget=budget, mesh=self._mesh, moves=MOVES)
        shares, _ = shards_of(step).share(*self._args)
        self._model.zero_grad()
        before = [*shares, *self._model.parameters(), *self._model.buffers()]
        peak = measure(partial(differentiate, step, shares), before=before).measured_peak_bytes
        return step, peak, _gradients(self._model)

    def smallest(self) -> int:
        """The smallest budget that is not refused."""
        try:
            fit(self._model, self._args, budget=1, mesh=self._mesh, moves=MOVES)
        except BudgetTooSmall as refused:
            return refused.minimum_bytes
        raise AssertionError("one byte is enough")


def within_budgets(
    net: str, size: str, settings: dict[str, Any], mesh: str, slack: float = 1.0
) -> list[Taken]:
    """A worker's step as it comes, half way to the smallest budget, and there."""
    part = Part(net, size, settings, mesh)
    roomy, plain, expected = part.run("1TiB")
    least = int(slack * part.smallest()) + shards_of(roomy).remembered_bytes
    return [_taken(part, budget, plain, expected) for budget in ((plain + least) // 2, least)]


def _taken(part: Part, budget: int, plain: int, expected: list[Tensor]) -> Taken:
    step, measured, gradients = part.run(budget)
    same = all(map(torch.equal, gradients, expected))
    return Taken(plain, budget, plans_of(step)[0].projected_peak_bytes, measured, same)


def _gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def _lines(net: str, found: list[list[Taken]]) -> Iterator[str]:
    for rank, taken in enumerate(found):
        for each in taken:
            told = "kept" if each.is_kept else "NOT KEPT"
            yield (
                f"{net} worker {rank}: plain {each.plain_bytes:,}, allowed {each.allowed_bytes:,},"
                f" projected {each.projected_bytes:,}, measured {each.measured_bytes:,}: {told}"
            )
            share = each.measured_bytes / each.allowed_bytes
            case = f"{net} on 2 x 2 workers, {each.allowed_bytes / each.plain_bytes:.2f} of the plain peak"
            Study("shards").tell(case, f"worker {rank}", "measured", share, "of the budget")


def main(_: Sequence[str]) -> None:
    """A line per net, worker and budget; draws that are replayed need a little more than the smallest."""
    for net, settings in MEMORY.items():
        found = on_workers(4, within_budgets, net, "real", settings, "space=2x2", 1.02)
        print("\n".join(_lines(net, found)), flush=True)
