"""Constraint: what a step has to keep to beside the sum of its tensors, and the loop that brings it there.

A plan is first made for all the bytes that a constraint allows. While the step exceeds the constraint, it is
planned again for fewer bytes: the excess is taken off, multiplied by 1, 2, 4 and so on. The first plan that
keeps to the constraint is taken, because more bytes mean less recomputation. The loop may miss a plan that
would have kept to the constraint. The budget is then refused; no plan over the constraint ever runs.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from stowplan.errors import BudgetTooSmall, PlanTooSlow
from stowplan.plan.options import Execution
from stowplan.plan.sockets import Socket
from stowplan.run.planning.planner import DraftedStep, replayed_bytes

_ATTEMPTS = 6  # sizes that are planned for


class Constraint(Protocol):
    """What a technique asks of the step beside a sum of bytes, and what it makes of the step for that."""

    def applied_to(self, step: DraftedStep) -> DraftedStep:
        """The step as it would run."""

    def excess_bytes(self, step: DraftedStep, allowed_bytes: int) -> int:
        """How far over is a step that this was applied to; at most 0 if it may run."""

    def refusal(
        self, step: DraftedStep, allowed_bytes: int, refused: BudgetTooSmall | None
    ) -> BudgetTooSmall:
        """Names the step with the least excess; `refused` is the error of the search, if it gave up."""


CONSTRAINTS: Socket[Constraint] = Socket("run", "arena", "held blocks")
"""What choices of `Execution` ask of a step."""


BUDGETS_BY_DEVICE: Socket[Callable[[Mapping[Any, float | str]], tuple[int, Constraint]]] = Socket(
    "run", "devices"
)
"""The sum of budgets by device, and what they ask of a step."""


def taken_bytes(step: DraftedStep) -> int:
    """What a step takes: its peak, and states of the generator."""
    return step.draft.projected_peak_bytes + replayed_bytes(step.draft)


def constraint_of(execution: Execution) -> Constraint | None:
    """What was chosen for the execution, if that asks anything."""
    chosen = CONSTRAINTS.offered(execution.constraints)
    return chosen[0] if chosen else None


def within(
    constraint: Constraint,
    allowed_bytes: int,
    planned: Callable[[int], DraftedStep],
    *,
    is_given: bool = False,
) -> DraftedStep:
    """The first step that `planned` makes for a number of bytes and that keeps to the constraint.

    BudgetTooSmall names the least excess. A plan that `is_given` is the only one there is.
    """
    room, refused = allowed_bytes, None
    nearest: tuple[int, DraftedStep] | None = None
    for attempt in range(_ATTEMPTS):
        try:
            step = planned(room)
        except PlanTooSlow:
            raise
        except BudgetTooSmall as refusal:
            room, refused = 0, refusal
            step = planned(refusal.minimum_bytes)
        step = constraint.applied_to(step)
        excess = constraint.excess_bytes(step, allowed_bytes)
        if excess <= 0:
            return replace(step, draft=replace(step.draft, allowed_bytes=allowed_bytes))
        if nearest is None or excess < nearest[0]:
            nearest = excess, step
        room = min(room, step.draft.requested_peak_bytes) - 2**attempt * excess
        if is_given or room <= 0:
            break
    assert nearest is not None
    raise constraint.refusal(nearest[1], allowed_bytes, refused)
