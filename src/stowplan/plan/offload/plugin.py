"""The frontier with a tier: schedules that recompute some tensors and offload others.

A descent starts at points all along the frontier of recomputation, among them the one that recomputes
nothing, and offloads storages. The result is the frontier of all outcomes and the points of recomputation
together, so a tier never makes a budget slower.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from stowplan.errors import BadUse
from stowplan.plan.frontier import Frontier, Point
from stowplan.plan.judge.simulate import bytes_beside, simulate
from stowplan.plan.offload.descent import descend
from stowplan.plan.offload.idle_intervals import idle_intervals_of
from stowplan.plan.offload.insert_transfers import Move, insert_transfers
from stowplan.plan.offload.transfer_schedule import TransferSchedule
from stowplan.plan.options import PlanOptions
from stowplan.plan.plan import Step
from stowplan.plan.planner import FRONTIER_EXTENSIONS
from stowplan.plan.pricing import Pricing, Tier
from stowplan.plan.problem import Problem
from stowplan.plan.schedule import steps_of

_STARTS = 8  # points of the frontier that are descended from


@dataclass(frozen=True, slots=True)
class MovedPoint(Point):
    """A schedule that offloads storages. Moves name steps by their place in the schedule of the states."""

    moves: tuple[Move, ...] = ()

    def steps(self, problem: Problem) -> tuple[Step, ...]:
        return insert_transfers(steps_of(problem, self.states), self.moves)


@FRONTIER_EXTENSIONS.register("offload", "offload-gradients")
def with_offload(problem: Problem, frontier: Frontier, pricing: Pricing, options: PlanOptions) -> Frontier:
    """The frontier with schedules that use the tier, also for gradients of finished layers if allowed."""
    if pricing.tier is None:
        raise BadUse("offload is allowed, but the prices have no tier to offload to")
    tier, gradients = pricing.tier, "offload-gradients" in options.allow
    points = list(frontier.points)
    for start in _evenly_spaced(frontier.points, _STARTS):
        points += _descended(problem, start, pricing, tier, gradients)
    return Frontier(tuple(_undominated(points)))


def _descended(
    problem: Problem, start: Point, pricing: Pricing, tier: Tier, gradients: bool
) -> Iterator[Point]:
    graph, steps = problem.graph, steps_of(problem, start.states)
    baseline = simulate(graph, steps, pricing)
    intervals = idle_intervals_of(graph, steps, gradients=gradients)
    transfers = TransferSchedule(steps, intervals, baseline, pricing.seconds, tier, bytes_beside(graph, tier))
    base = baseline.seconds - start.extra_seconds
    for outcome in descend(transfers, problem.standing_bytes, tier.capacity_bytes):
        yield MovedPoint(outcome.peak_bytes, outcome.seconds - base, start.states, outcome.moves)


def _evenly_spaced(points: Sequence[Point], count: int) -> list[Point]:
    """Some of the points at even distances, the first and the last among them."""
    last = len(points) - 1
    return [points[place] for place in sorted({number * last // (count - 1) for number in range(count)})]


def _undominated(points: Iterable[Point]) -> Iterator[Point]:
    """By ascending peak, each faster than all below."""
    fastest = float("inf")
    for point in sorted(points, key=lambda point: (point.peak_bytes, point.extra_seconds)):
        if point.extra_seconds < fastest:
            fastest = point.extra_seconds
            yield point
