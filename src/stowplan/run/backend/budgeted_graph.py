"""Budgeted graph: a graph under a shared budget, and its known place among the other graphs of the step."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from stowplan.capture import Captured
from stowplan.ir import Graph
from stowplan.plan.frontier import floor_of
from stowplan.plan.options import PlanOptions
from stowplan.plan.planner import Planner
from stowplan.plan.pricing import Pricing
from stowplan.plan.problem import problem_of
from stowplan.run.backend.frontier_plans import FrontierPlans, PlannedPoint
from stowplan.run.planning.planner import price_captured
from stowplan.watch import limited_to


@dataclass(eq=False)
class BudgetedGraph:
    """One captured graph, the point of its frontier that it may use, and whether others run before its
    backward.

    To a graph that is followed, the others look like an op with a large workspace between its halves. Their
    workspace is assumed to be this graph's own smallest peak, so that the plan keeps little between the
    halves and also has a small peak.
    """

    captured: Captured
    options: PlanOptions
    is_followed: bool
    index: int = 0
    is_known: bool = False  # whether a whole step with it has been seen
    lingering_bytes: int = 0  # of results that the caller held after the backward
    _frontier_plans: dict[bool, FrontierPlans] = field(default_factory=dict)

    def point(self, index: int) -> PlannedPoint:
        """The plan at a point, for a graph that is followed or not, as far as is known."""
        return self.plans(is_followed=self.is_followed).point(index)

    def smallest(self) -> PlannedPoint:
        """The plan with the smallest peak, however much it keeps between its halves."""
        return self.plans(is_followed=False).point(0)

    def learn(self, index: int, *, is_followed: bool) -> None:
        """Remember the point that one sequence of graphs leaves to it; the smallest of several counts."""
        if self.is_known and is_followed == self.is_followed:
            self.index = min(self.index, index)
        elif is_followed or not self.is_known:
            self.index, self.is_followed = index, is_followed
        self.is_known = True

    def plans(self, *, is_followed: bool) -> FrontierPlans:
        """The plans for a graph that is followed, or is not; the first call searches for them."""
        if is_followed not in self._frontier_plans:
            with limited_to(self.options.search.time_limit):
                planner = self._planner(is_followed)
            self._frontier_plans[is_followed] = FrontierPlans(planner, self._pricing)
        return self._frontier_plans[is_followed]

    def _planner(self, is_followed: bool) -> Planner:
        graph, pricing = self.captured.graph, self._pricing
        return Planner.of(
            graph,
            _with_others_between(graph, pricing) if is_followed else pricing,
            plain_peak_bytes=self.captured.eager.peak_bytes(pricing.workspace_bytes),
            options=self.options,
        )

    @cached_property
    def _pricing(self) -> Pricing:
        return price_captured(self.captured)


def _with_others_between(graph: Graph, pricing: Pricing) -> Pricing:
    """The first op of backward gets an additional workspace: the smallest peak of the whole step.

    If gradients pass through unchanged, backward has no op, and the last op of forward gets it.
    """
    problem = problem_of(graph, [pricing.seconds[op.id] for op in graph.ops], pricing.workspace_bytes)
    first = graph.ops[min(problem.turn, len(graph.ops) - 1)].id
    others = floor_of(problem) - problem.standing_bytes
    workspace = {**pricing.workspace_bytes, first: pricing.workspace_bytes.get(first, 0) + others}
    return replace(pricing, workspace_bytes=workspace)
