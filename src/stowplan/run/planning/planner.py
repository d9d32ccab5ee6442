"""The master problem of a captured step: what `fit`, `check` and the command line plan living models by."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import nn

from stowplan.capture import Captured
from stowplan.plan.candidate import PlainStep
from stowplan.plan.plan import Plan
from stowplan.plan.planner import TECHNIQUES, known_techniques
from stowplan.plan.select import MasterPlanner, Prefer
from stowplan.run.cost.probe import Progress
from stowplan.run.planning.price import price_captured
from stowplan.run.step.straight import StraightStep
from stowplan.run.step.waiting import waiting_of
from stowplan.run.tiles.ways import CapturedWay, Search, StepWay, Subject, ways_of


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan and the step it is for, which has sweeps where the plan has tiles."""

    plan: Plan
    captured: Captured

    def bound_to(
        self,
        model: nn.Module,
        *,
        loss: object = None,
        places: Mapping[int, tuple[Any, Any]] = MappingProxyType({}),
    ) -> StraightStep:
        """The step, ready to be called like the model; `places` has where some of its constants are found."""
        return StraightStep(
            self.captured,
            model,
            loss=loss,
            steps=self.plan.steps,
            waiting=waiting_of(model),
            places=places,
        )


def step_planner(
    subject: Subject,
    *,
    allow: Iterable[str] = TECHNIQUES,
    prefer: Prefer = Prefer.EXACTNESS,
    progress: Progress | None = None,
    moves: int | None = None,
) -> MasterPlanner[StepWay]:
    """Tries the ops of a step; frontiers are searched when a budget first asks for them."""
    search = Search(known_techniques(allow), moves, progress)
    captured = subject.as_run(subject.captured.graph) if subject.otherwise else subject.captured
    pricing = price_captured(captured, progress, search.allow)
    seconds = sum(pricing.seconds[op.id] for op in captured.graph.ops)
    step = PlainStep(seconds, captured.eager.peak_bytes(pricing.workspace_bytes))
    plain: StepWay = CapturedWay(captured, pricing, step, search)
    known = None if subject.otherwise else pricing
    return MasterPlanner(plain, step, partial(ways_of, subject, known, step, search), prefer)


def plan_step(
    subject: Subject,
    allowed_bytes: int,
    *,
    allow: Iterable[str] = TECHNIQUES,
    prefer: Prefer = Prefer.EXACTNESS,
    progress: Progress | None = None,
    moves: int | None = None,
) -> PlannedStep:
    """The best plan within `allowed_bytes`; raises BudgetTooSmall with the smallest that was found."""
    planner = step_planner(subject, allow=allow, prefer=prefer, progress=progress, moves=moves)
    plan, way = planner.answer(allowed_bytes)
    return PlannedStep(plan, way.captured)
