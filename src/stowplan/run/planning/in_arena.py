"""Planning a step that runs in an arena: the budget then limits the arena and what lies beside it.

A plan is made for the budget and laid out. If the arena takes more than tensors request, the step is planned
again for that much less.
"""

from collections.abc import Callable
from dataclasses import replace

from stowplan.errors import BudgetTooSmall, PlanTooSlow
from stowplan.plan.allocator.arena import ArenaLayout, lay_out
from stowplan.plan.explain.timeline import timeline_of_plan
from stowplan.run.cost.machine import device_of
from stowplan.run.planning.planner import DraftedStep, replayed_bytes
from stowplan.run.step.arena import placements_of
from stowplan.units import format_bytes

_ATTEMPTS = 4


def in_arena(
    allowed_bytes: int, planned: Callable[[int], DraftedStep], *, is_given: bool = False
) -> DraftedStep:
    """The step that `planned` makes for a budget, in an arena that takes at most `allowed_bytes`.

    BudgetTooSmall names a budget that suffices. A plan that `is_given` is the only one there is.
    """
    room, least, binding = allowed_bytes, allowed_bytes, tuple[str, ...]()
    for attempt in range(_ATTEMPTS):
        try:
            found = _laid_out(planned(room))
        except PlanTooSlow:
            raise
        except BudgetTooSmall as refusal:
            room, binding = 0, refusal.binding
            found = _laid_out(planned(refusal.minimum_bytes))
        taken = found.draft.projected_peak_bytes + replayed_bytes(found.draft)
        if taken <= allowed_bytes:
            return replace(found, draft=replace(found.draft, allowed_bytes=allowed_bytes))
        least = taken if attempt == 0 else min(taken, least)
        room = min(room, found.draft.requested_peak_bytes) - 2**attempt * (taken - allowed_bytes)
        if is_given or room <= 0:
            break
    raise BudgetTooSmall(
        f"{format_bytes(allowed_bytes)} allowed, but the smallest arena that was found takes"
        f" {format_bytes(least)} ({least} bytes) together with what lies beside it; without an arena the step"
        " may fit",
        allowed_bytes=allowed_bytes,
        minimum_bytes=least,
        binding=binding,
    )


def _laid_out(step: DraftedStep) -> DraftedStep:
    layout = layout_of(step)
    return replace(step, arena=layout, draft=replace(step.draft, arena=layout.use))


def layout_of(step: DraftedStep) -> ArenaLayout:
    """Where the tensors of a planned step lie in an arena."""
    graph, program, device = step.captured.graph, step.captured.program, device_of(step.captured.graph)
    placements = placements_of(step.captured, step.draft.steps, step.draft.pricing.workspace_bytes, device)
    leaving = {graph.storage_of(gradient) for gradient in program.gradients.values()}
    alignment = 64 if device.type == "cpu" else 512  # of blocks of PyTorch's allocators
    return lay_out(timeline_of_plan(step.draft), placements, leaving=leaving, alignment=alignment)
