"""A plan from elsewhere for a captured step: from a file, from the cache, or of another worker."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from stowplan.capture import Captured
from stowplan.errors import IllegalPlan, PlanOfAnotherStep
from stowplan.plan.draft import Draft
from stowplan.plan.files.sameness import first_difference, other_ops
from stowplan.plan.plan import Plan
from stowplan.plan.problem import slices_last
from stowplan.plan.sockets import Socket
from stowplan.units import format_bytes

if TYPE_CHECKING:
    pass
from stowplan.run.planning.planner import DraftedStep, Subject, replayed_bytes

RESUMED: Socket[Callable[[Draft, Subject], Captured]] = Socket("run", "tile", "compiled")
"""How a step is captured that a draft from elsewhere is for, where a technique changed its graph."""

ADOPTED: Socket[Callable[[Draft, Subject], Captured]] = Socket("run", "tile")
"""The same for the draft of another worker, whose step has the same ops on tensors of the same sizes."""


def saved_step(plan: Plan, subject: Subject, allowed_bytes: int) -> DraftedStep:
    """A step with the draft of a plan from elsewhere; IllegalPlan if that is for another step or budget."""
    captured, draft = subject.captured, replace(plan.draft(), arena=None)  # laid out anew if one is asked for
    if draft.tile_maps:
        captured = RESUMED.of("tile")(draft, subject)
    elif draft.kernels or draft.relaid:
        captured = RESUMED.of("compiled")(draft, subject)
    difference = first_difference(draft.graph, slices_last(captured.graph))
    if difference is not None and plan.projected_for:
        kinds = other_ops(draft.graph, captured.graph) or "none in number"
        raise PlanOfAnotherStep(
            f"the plan was projected for {plan.projected_for}, and the step captured here differs:"
            f" {difference}; ops that differ: {kinds}; make a plan here with `plan`"
        )
    if difference is not None:
        raise PlanOfAnotherStep(
            f"the plan is for another step: {difference}; make one for this step with `plan`"
        )
    taken_bytes = draft.projected_peak_bytes + replayed_bytes(draft)
    if taken_bytes > allowed_bytes:
        raise IllegalPlan(
            f"the plan takes {format_bytes(taken_bytes)}, and {format_bytes(allowed_bytes)} are allowed"
        )
    return DraftedStep(draft, captured)
