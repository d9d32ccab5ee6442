"""The sizes at which programs were planned, and plans for further sizes that are carried over from them.

`plan/carry.py` has the formulation. A further size is captured like any call, so what runs is its own
program; only prices and decisions come from the sizes before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import log

from stowplan.errors import BudgetTooSmall
from stowplan.plan.bound import relaxed_bound_of
from stowplan.plan.carry import GAP, PlannedSize, carried_point, carried_pricing, nbytes_of, outline_of
from stowplan.plan.frontier import Frontier
from stowplan.plan.options import PlanOptions
from stowplan.plan.planner import Planner
from stowplan.plan.pricing import Basis
from stowplan.plan.problem import slices_last
from stowplan.plan.select import problem_in_order
from stowplan.run.planning.planner import DraftedStep, Subject, draft_within, price_captured, replay_bytes

_MOST_SIZES = 24  # of all programs; the oldest makes room


@dataclass(slots=True)
class PlannedSizes:
    """The sizes of one fitted module's programs whose ops were probed."""

    known: list[PlannedSize] = field(default_factory=list)

    def add(self, found: DraftedStep) -> None:
        """Let further sizes take over from this draft, if its decisions are of a kind that can be carried."""
        draft = found.draft
        if draft.is_tiled or draft.pricing.tier is not None or draft.pricing.basis is not Basis.MEASURED:
            return
        ordered = slices_last(found.captured.graph)
        size = PlannedSize.of(ordered, draft.pricing, found.points, draft.steps, draft.allowed_bytes)
        self.known = [*self.known, size][-_MOST_SIZES:]

    def step_for(self, subject: Subject, allowed_bytes: int, options: PlanOptions) -> DraftedStep | None:
        """The step with a draft carried over from the nearest size; None if it has to be searched."""
        if not self.known or options.offloads or "recompute" not in options.allow or subject.replacements:
            return None
        captured = subject.captured
        ordered = slices_last(captured.graph)
        outline = outline_of(ordered)
        alike = [size for size in self.known if size.outline == outline]
        if not alike:
            return None
        carried = carried_pricing(ordered, alike)
        pricing = carried or price_captured(captured, options)
        problem = problem_in_order(ordered, pricing)
        room = allowed_bytes - replay_bytes(captured)
        nearest = _nearest(alike, int(nbytes_of(ordered).sum()))
        point = carried_point(problem, nearest.policies, room)
        if point is None:
            return None
        bound = plain = sum(problem.seconds)
        if point.extra_seconds > GAP * plain:
            bound += relaxed_bound_of(problem, room)
            if bound and (plain + point.extra_seconds) / bound - 1.0 > nearest.gap + GAP:
                return None
        peak = captured.eager.peak_bytes(pricing.workspace_bytes)
        planner = Planner(problem, pricing, Frontier((point,)), peak, is_searched=False)
        try:
            draft = draft_within(planner, allowed_bytes)
        except BudgetTooSmall:
            return None
        if draft.time_ratio > options.slowest:
            return None
        step = DraftedStep(replace(draft, bound_seconds=bound), captured, is_carried=True)
        if carried is None:
            self.add(step)
        return step


def _nearest(sizes: Sequence[PlannedSize], nbytes: int) -> PlannedSize:
    """The size with the most similar tensors; of sizes alike, one that was searched."""

    def distance(size: PlannedSize) -> tuple[float, int]:
        return abs(log(max(1, nbytes) / max(1, int(size.nbytes.sum())))), -len(size.policies)

    return min(sizes, key=distance)
