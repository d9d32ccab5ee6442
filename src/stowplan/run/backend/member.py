"""Member: a graph under a shared budget, and what is known of its place among the others."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from stowplan.capture import Captured
from stowplan.ir import Graph
from stowplan.plan.frontier import floor_of
from stowplan.plan.options import PlanOptions
from stowplan.plan.planner import Planner
from stowplan.plan.pricing import Pricing
from stowplan.plan.problem import problem_of
from stowplan.run.backend.ladder import Ladder, Rung
from stowplan.run.planning.price import price_captured


@dataclass(eq=False)
class Member:
    """One captured graph, how high it may stand on its ladder, and whether others follow before its backward.

    To a graph that is followed, the others are like an op between its halves with a large workspace. They are
    taken to need as much as this graph does at its smallest, so that it is planned for keeping little
    meanwhile, besides having a small peak of its own.
    """

    captured: Captured
    allow: tuple[str, ...]
    moves: int | None
    is_followed: bool
    height: int = 0
    is_known: bool = False  # whether a whole step with it has been seen
    lingering_bytes: int = 0  # of its results, what the caller was seen to hold beyond its backward
    _ladders: dict[bool, Ladder] = field(default_factory=dict)

    def rung(self, height: int) -> Rung:
        """A rung of the ladder that fits what is known."""
        return self.ladder(is_followed=self.is_followed).rung(height)

    def smallest(self) -> Rung:
        """The smallest peak, whatever is kept."""
        return self.ladder(is_followed=False).rung(0)

    def learn(self, height: int, *, is_followed: bool) -> None:
        """A sequence of graphs that it belongs to lets it stand this high. Of several the lowest counts."""
        if self.is_known and is_followed == self.is_followed:
            self.height = min(self.height, height)
        elif is_followed or not self.is_known:
            self.height, self.is_followed = height, is_followed
        self.is_known = True

    def ladder(self, *, is_followed: bool) -> Ladder:
        """The plans for either case; searching for them takes a while the first time."""
        if is_followed not in self._ladders:
            self._ladders[is_followed] = Ladder(self._planner(is_followed), self._pricing)
        return self._ladders[is_followed]

    def _planner(self, is_followed: bool) -> Planner:
        graph, pricing = self.captured.graph, self._pricing
        return Planner.of(
            graph,
            _with_others_between(graph, pricing) if is_followed else pricing,
            plain_peak_bytes=self.captured.eager.peak_bytes(pricing.workspace_bytes),
            options=PlanOptions(allow=self.allow, moves=self.moves),
        )

    @cached_property
    def _pricing(self) -> Pricing:
        return price_captured(self.captured)


def _with_others_between(graph: Graph, pricing: Pricing) -> Pricing:
    """As if the first op of backward needed, besides, what the whole step needs at least."""
    problem = problem_of(graph, [pricing.seconds[op.id] for op in graph.ops], pricing.workspace_bytes)
    first = graph.ops[problem.turn].id
    others = floor_of(problem) - problem.standing_bytes
    workspace = {**pricing.workspace_bytes, first: pricing.workspace_bytes.get(first, 0) + others}
    return replace(pricing, workspace_bytes=workspace)
