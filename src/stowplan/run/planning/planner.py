"""Planning a captured step: price its ops, search, and take the best of its candidates."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeAlias

from stowplan.capture import Captured, Handle
from stowplan.plan.candidate import Baseline, Candidate, GraphCandidate, Refusals
from stowplan.plan.frontier import Point
from stowplan.plan.options import DEFAULT_OPTIONS, PlanOptions, Prefer
from stowplan.plan.plan import Plan
from stowplan.plan.pricing import Pricing
from stowplan.plan.select import Selector
from stowplan.plan.technique import Socket
from stowplan.run.planning.price import plan_within, price_captured
from stowplan.run.planning.subject import PlannedStep, Subject


class StepCandidate(Candidate, Protocol):
    """A candidate that can be run."""

    @property
    def captured(self) -> Captured:
        """The step that its plans are for."""


StepCandidates: TypeAlias = Callable[
    [Subject, Pricing | None, Baseline, PlanOptions, Refusals], Iterable[StepCandidate]
]
STEP_CANDIDATES: Socket[StepCandidates] = Socket("run", "tile")
"""What techniques make of a captured step. The pricing is that of its ops, if they were probed."""


class CapturedCandidate(GraphCandidate):
    """A step whose ops were probed. Its plans are verified and leave room for the draws they replay."""

    def __init__(
        self, captured: Captured, pricing: Pricing, baseline: Baseline, options: PlanOptions
    ) -> None:
        super().__init__(captured.graph, pricing, baseline, options)
        self.captured = captured

    @property
    def points(self) -> tuple[Point, ...]:
        """The frontier, if a budget has asked for it."""
        return self.searched.points if self.searched else ()

    def plan(self, allowed_bytes: int) -> Plan:
        plan = self.told(self.answered(allowed_bytes, plan_within))
        return replace(plan, plain_seconds=plan.plain_seconds - _added_seconds(self.captured))


def step_planner(subject: Subject, options: PlanOptions = DEFAULT_OPTIONS) -> Selector[StepCandidate]:
    """Probes the ops of a step; frontiers are searched when a budget first asks for them."""
    captured = subject.as_run()
    pricing = price_captured(captured, options)
    seconds = sum(pricing.seconds[op.id] for op in captured.graph.ops) - _added_seconds(captured)
    baseline = Baseline(seconds, captured.eager.peak_bytes(pricing.workspace_bytes))
    plain: StepCandidate = CapturedCandidate(captured, pricing, baseline, options)
    known = None if subject.replacements else pricing
    find = partial(_candidates, subject, known, baseline, options)
    return Selector(plain, baseline, find, Prefer(options.prefer))


def _added_seconds(captured: Captured) -> float:
    """What ops of the plan wait for and eager does not: transfers of optimizer state."""
    handles = (a for call in captured.program.calls.values() for a in call.args if isinstance(a, Handle))
    return sum(handle.added_seconds for handle in handles)


def _candidates(
    subject: Subject, pricing: Pricing | None, baseline: Baseline, options: PlanOptions, refusals: Refusals
) -> Iterator[StepCandidate]:
    for candidates in STEP_CANDIDATES.offered(options.allow):
        yield from candidates(subject, pricing, baseline, options, refusals)


def plan_step(subject: Subject, allowed_bytes: int, options: PlanOptions = DEFAULT_OPTIONS) -> PlannedStep:
    """The best plan within `allowed_bytes`; raises BudgetTooSmall with the smallest that was found."""
    plan, candidate = step_planner(subject, options).answer(allowed_bytes)
    points = candidate.points if isinstance(candidate, CapturedCandidate) else ()
    return PlannedStep(plan, candidate.captured, points)
