"""Candidates: graphs for one step that answer budgets. The baseline graph is one; techniques add others."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Protocol, TypeAlias

from stowplan.errors import BudgetTooSmall, NotTileable
from stowplan.ir import Graph
from stowplan.plan.bound import relaxed_bound_of
from stowplan.plan.frontier import Frontier, floor_of
from stowplan.plan.options import PlanOptions
from stowplan.plan.order import slices_last
from stowplan.plan.plan import Exactness, Plan
from stowplan.plan.planner import Planner
from stowplan.plan.pricing import Pricing
from stowplan.plan.problem import Problem, problem_of
from stowplan.plan.technique import Socket


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """A peak, the seconds of the whole step at that peak, and how exact its gradients are."""

    peak_bytes: int
    seconds: float
    exactness: Exactness


@dataclass(frozen=True, slots=True)
class Baseline:
    """The step without a plan, which plans are compared with."""

    seconds: float
    peak_bytes: int


class Candidate(Protocol):
    """A graph for the step that can answer a budget. Its bounds are known before its plans are searched.

    Every method may raise NotTileable; the graph is then dropped as a candidate.
    """

    @property
    def stretches(self) -> tuple[str, ...]:
        """The parts of the step that it computes in another way, by names that a user knows."""

    @property
    def floor_bytes(self) -> int:
        """The smallest peak expected of its plans."""

    def bounds(self, allowed_bytes: int) -> Iterator[float]:
        """Lower bounds on the seconds of its plans within a budget; infinite if no plan is.

        Each bound is closer than the one before, and takes longer to compute.
        """

    def plan(self, allowed_bytes: int) -> Plan:
        """The fastest plan found; raises BudgetTooSmall."""

    def tradeoffs(self) -> Iterable[Tradeoff]:
        """All pairs of peak and time that its plans have."""


class Refusals:
    """Why stretches of a step are in no candidate: each reason once, with the first stretch it holds for."""

    def __init__(self) -> None:
        self._stretches: dict[str, str] = {}

    def add(self, stretch: str, refusal: NotTileable) -> None:
        """No candidate has this stretch, for this reason."""
        self._stretches.setdefault(refusal.reason, stretch)

    def sentences(self) -> tuple[str, ...]:
        """All reasons, in the order in which they were found."""
        return tuple(f"{stretch}: {reason}" for reason, stretch in self._stretches.items())


GraphCandidates: TypeAlias = Callable[[Graph, Pricing, Baseline, PlanOptions, Refusals], Iterable[Candidate]]
GRAPH_CANDIDATES: Socket[GraphCandidates] = Socket("plan", "tile")
"""What techniques make of a graph of which nothing but its file is known."""


def tradeoffs_of(planner: Planner, exactness: Exactness) -> tuple[Tradeoff, ...]:
    """The frontier of a planner as offers."""
    base = sum(planner.problem.seconds)
    return tuple(Tradeoff(p.peak_bytes, base + p.extra_seconds, exactness) for p in planner.frontier.points)


def problem_in_order(graph: Graph, pricing: Pricing) -> Problem:
    """The problem that a planner of the graph has."""
    ordered = slices_last(graph)
    return problem_of(ordered, [pricing.seconds[op.id] for op in ordered.ops], pricing.workspace_bytes)


class GraphCandidate:
    """A graph whose frontier is searched when it is first asked."""

    def __init__(
        self,
        graph: Graph,
        pricing: Pricing,
        baseline: Baseline,
        options: PlanOptions,
    ) -> None:
        self.graph, self.pricing, self.baseline, self.options = graph, pricing, baseline, options
        self.searched: Frontier | None = None  # for the latest plan, by one budget or by all

    @property
    def stretches(self) -> tuple[str, ...]:
        return ()

    @cached_property
    def floor_bytes(self) -> int:
        # What may leave for a tier need not be in memory.
        return self._problem.standing_bytes if self.options.offloads else floor_of(self._problem)

    def bounds(self, allowed_bytes: int) -> Iterator[float]:
        yield self.least_seconds(allowed_bytes)

    def least_seconds(self, allowed_bytes: int) -> float:
        """A lower bound on the seconds of any plan within a budget; infinite if no plan is."""
        if allowed_bytes < self.floor_bytes:
            return inf
        bound = 0.0 if self.options.offloads else relaxed_bound_of(self._problem, allowed_bytes)
        return sum(self._problem.seconds) + bound

    @cached_property
    def _problem(self) -> Problem:
        return problem_in_order(self.graph, self.pricing)

    @cached_property
    def planner(self) -> Planner:
        """The searched frontier."""
        return Planner.of(self.graph, self.pricing, self.options)

    @cached_property
    def _baseline(self) -> Planner:
        """The schedule that recomputes nothing."""
        return Planner.unsearched(self._problem, self.pricing, self.baseline.peak_bytes)

    def plan(self, allowed_bytes: int) -> Plan:
        return self.told(self.answered(allowed_bytes, Planner.plan))

    def answered(self, allowed_bytes: int, ask: Callable[[Planner, int], Plan]) -> Plan:
        """The plan of the first planner that is good enough; `ask` asks a planner for the budget.

        The planners are the baseline, a search for this budget alone, and the search for all budgets.
        """
        if self._baseline.minimum_bytes <= allowed_bytes:
            return ask(self._baseline, allowed_bytes)
        focused = self._focused(allowed_bytes)
        near = _asked(focused, allowed_bytes, ask)
        if near is not None and near.gap <= self.options.gap:
            return near
        self.searched = self.planner.frontier
        try:
            found = ask(replace(self.planner, bounds=focused.bounds if focused else {}), allowed_bytes)
        except BudgetTooSmall:
            if near is None:
                raise
            found = near
        if near is not None and near.projected_seconds < found.projected_seconds:
            found = near
        return replace(found, cut_short=self.planner.frontier.ended)

    def _focused(self, allowed_bytes: int) -> Planner | None:
        """A search for this budget alone; None where it cannot know how near it is to the bound."""
        unbounded = self.options.offloads or "recompute" not in self.options.allow or self.options.gap == 0
        if unbounded or allowed_bytes < self.floor_bytes:
            return None
        peak = self.baseline.peak_bytes
        planner = Planner.focused(self._problem, self.pricing, peak, allowed_bytes, self.options)
        self.searched = planner.frontier
        return planner

    def told(self, plan: Plan) -> Plan:
        """A plan of its planner, compared with the baseline."""
        return replace(plan, plain_peak_bytes=self.baseline.peak_bytes)

    def tradeoffs(self) -> tuple[Tradeoff, ...]:
        return tradeoffs_of(self.planner, Exactness.BITWISE)


def _asked(planner: Planner | None, allowed_bytes: int, ask: Callable[[Planner, int], Plan]) -> Plan | None:
    """The plan of a planner; None if it has none."""
    try:
        return ask(planner, allowed_bytes) if planner else None
    except BudgetTooSmall:
        return None
