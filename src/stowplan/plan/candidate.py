"""Way: one graph for the step, with tiles or without, that answers budgets with plans."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Protocol

from stowplan.ir import Graph
from stowplan.plan.bound import relaxed_bound_of
from stowplan.plan.decision import Again, Decision
from stowplan.plan.frontier import floor_of
from stowplan.plan.order import slices_last
from stowplan.plan.plan import Exactness, Plan
from stowplan.plan.planner import ON_REQUEST, Planner
from stowplan.plan.pricing import Pricing
from stowplan.plan.problem import Problem, problem_of
from stowplan.plan.tile_map import TileMap

_FEWEST, _MOST, _BY_OP = 12_000, 80_000, 100  # moves of a search, and how many an op is worth


def search_moves(graph: Graph) -> int:
    """For one of many ways: few, for sweeps have made most graphs small; more where many ops are left."""
    return min(_MOST, max(_FEWEST, _BY_OP * len(graph.ops)))


@dataclass(frozen=True, slots=True)
class Offer:
    """What can be had: a peak, the seconds of the whole step, and how exact it is."""

    peak_bytes: int
    seconds: float
    exactness: Exactness


@dataclass(frozen=True, slots=True)
class PlainStep:
    """What plans are told against."""

    seconds: float
    peak_bytes: int


class Way(Protocol):
    """A source of plans, of which some things can be known before plans are searched for.

    What is asked of it may raise NotTileable, if it turns out to be no way at all.
    """

    @property
    def stretches(self) -> tuple[str, ...]:
        """What it has in tiles, as a user knows that."""

    @property
    def floor_bytes(self) -> int:
        """No plan of it is expected to need less."""

    def bounds(self, allowed_bytes: int) -> Iterator[float]:
        """Seconds that no plan of it within so many bytes is expected to be below; infinite if there is none.

        Each is closer than the one before, and takes longer to know.
        """

    def plan(self, allowed_bytes: int) -> Plan:
        """The fastest plan found; raises BudgetTooSmall."""

    def offers(self) -> Iterable[Offer]:
        """All that it can answer with."""


@dataclass(frozen=True, slots=True)
class Sweeps:
    """The sweeps of a graph: what they decide, the work they add, how to draw their maps, their stretches.

    There may be sweeps and no decisions: nothing is inside of one that has a loss alone.
    """

    decisions: Mapping[str, Decision]
    extra_macs: int
    maps: Callable[[], tuple[TileMap, ...]]
    macs: Mapping[str, int] = field(default_factory=dict)  # by sweep: of running it once more
    stretches: tuple[str, ...] = ()

    def told(self, plan: Plan, plain: PlainStep) -> Plan:
        """A plan for the graph with the sweeps, told against the plain step."""
        again = (self.macs.get(step.op, 0) for step in plan.steps if isinstance(step, Again))
        return replace(
            plan,
            decisions={**plan.decisions, **self.decisions},
            plain_peak_bytes=plain.peak_bytes,
            plain_seconds=plain.seconds,
            bound_seconds=min(plain.seconds, plan.bound_seconds),
            extra_macs=plan.extra_macs + self.extra_macs + sum(again),
            tile_maps=self.maps(),
        )


def offers_of(planner: Planner, exactness: Exactness) -> tuple[Offer, ...]:
    """The frontier of a planner as offers."""
    base = sum(planner.problem.seconds)
    return tuple(Offer(p.peak_bytes, base + p.extra_seconds, exactness) for p in planner.frontier.points)


def problem_in_order(graph: Graph, pricing: Pricing) -> Problem:
    """The problem that a planner of the graph has."""
    ordered = slices_last(graph)
    return problem_of(ordered, [pricing.seconds[op.id] for op in ordered.ops], pricing.workspace_bytes)


class GraphWay:
    """A graph whose frontier is searched when it is first asked."""

    def __init__(
        self,
        graph: Graph,
        pricing: Pricing,
        plain: PlainStep,
        *,
        allow: Iterable[str],
        sweeps: Sweeps | None = None,
        moves: int | None = None,
    ) -> None:
        self.graph, self.pricing = graph, pricing
        self._plain, self._allow, self._sweeps, self._moves = plain, tuple(allow), sweeps, moves

    @property
    def stretches(self) -> tuple[str, ...]:
        return self._sweeps.stretches if self._sweeps else ()

    @cached_property
    def floor_bytes(self) -> int:
        return self._problem.standing_bytes if self._may_move else floor_of(self._problem)

    def bounds(self, allowed_bytes: int) -> Iterator[float]:
        yield self.least_seconds(allowed_bytes)

    def least_seconds(self, allowed_bytes: int) -> float:
        """What no plan within so many bytes is below; infinite if there is none."""
        if allowed_bytes < self.floor_bytes:
            return inf
        bound = 0.0 if self._may_move else relaxed_bound_of(self._problem, allowed_bytes)
        return sum(self._problem.seconds) + bound

    @property
    def _may_move(self) -> bool:
        """Whether anything may leave for a tier: then little is sure to be there, or to cost time."""
        return not set(ON_REQUEST).isdisjoint(self._allow)

    @cached_property
    def _problem(self) -> Problem:
        return problem_in_order(self.graph, self.pricing)

    @cached_property
    def planner(self) -> Planner:
        """The searched frontier."""
        return Planner.of(self.graph, self.pricing, allow=self._allow, moves=self._moves)

    def plan(self, allowed_bytes: int) -> Plan:
        return self.told(self.planner.plan(allowed_bytes))

    def told(self, plan: Plan) -> Plan:
        """A plan of its planner, told against the plain step."""
        if self._sweeps:
            return self._sweeps.told(plan, self._plain)
        return replace(plan, plain_peak_bytes=self._plain.peak_bytes)

    def offers(self) -> tuple[Offer, ...]:
        return offers_of(self.planner, Exactness.ROUNDING if self._sweeps else Exactness.BITWISE)
