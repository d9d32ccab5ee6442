"""Choosing among divisions of a step: each worker plans its part of an option, and the fastest is used.

The plan of a worker's part shows its time: ops are probed, and tensors that do not fit are recomputed or
tiled. Options are planned in the order of their expected time, and only while one could still be faster.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stowplan.errors import BudgetTooSmall
from stowplan.run.planning.planner import DraftedStep, PlannedStep
from stowplan.techniques.shards.plan.options import Option
from stowplan.techniques.shards.run.step import ShardedStep
from stowplan.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from stowplan.techniques.iteration.run.planner import Variant

_MOST = 4  # options that are planned although others fit


@dataclass(frozen=True, slots=True)
class Attempt:
    """An option as this worker would run it, and the seconds of the slowest: of its plan, and of its ops."""

    sharded: ShardedStep
    drafted: DraftedStep
    planned_seconds: float
    plain_seconds: float
    variant: "Variant | None" = None  # of the iteration, if the plan is for one

    def step_seconds(self, option: Option) -> float:
        """The planned seconds of this worker and the projected seconds of its collectives."""
        return self.planned_seconds + option.expected_seconds(0.0)


@dataclass(frozen=True, slots=True)
class StepOnMesh:
    """The attempt that was taken: this worker's part of the step, and its plan."""

    sharded: ShardedStep
    planned: PlannedStep


@dataclass(frozen=True, slots=True)
class Tried:
    """The outcome of one option."""

    option: Option
    verdict: str

    def __str__(self) -> str:
        return f"{self.option}: {self.verdict}"


def fastest_that_fits(
    options: Sequence[Option], attempt: Callable[[Option], Attempt]
) -> tuple[Attempt, tuple[Tried, ...]]:
    """The attempt that is fastest on all workers, and all options with their verdicts.

    Raises BudgetTooSmall with the smallest budget of any option.
    """
    waiting, scale = list(options), 1.0
    found: dict[int, Attempt] = {}  # by the option's place
    refused: dict[int, BudgetTooSmall] = {}
    while waiting and len(found) < _MOST:
        option = min(waiting, key=lambda each: each.expected_seconds(scale))
        if found and option.expected_seconds(scale) >= _best(options, found)[1]:
            break
        waiting.remove(option)
        place = options.index(option)
        try:
            made = found[place] = attempt(option)
            scale = made.plain_seconds / option.projection.compute_seconds
        except BudgetTooSmall as refusal:
            refused[place] = refusal
    if not found:
        raise min(refused.values(), key=lambda refusal: refusal.minimum_bytes)
    taken, _ = _best(options, found)
    verdicts = (
        _verdict(option, found.get(n), refused.get(n), scale, n == taken) for n, option in enumerate(options)
    )
    return found[taken], tuple(map(Tried, options, verdicts))


def _best(options: Sequence[Option], found: dict[int, Attempt]) -> tuple[int, float]:
    seconds = {place: attempt.step_seconds(options[place]) for place, attempt in found.items()}
    return min(seconds.items(), key=lambda item: item[1])


def _verdict(
    option: Option, found: Attempt | None, refused: BudgetTooSmall | None, scale: float, is_taken: bool
) -> str:
    if found is not None:
        return f"{'taken' if is_taken else 'slower'}, {format_seconds(found.step_seconds(option))} as planned"
    if refused is not None:
        return f"too large, needs {format_bytes(refused.minimum_bytes)} on its largest worker"
    return f"not planned, {format_seconds(option.expected_seconds(scale))} at the least"
