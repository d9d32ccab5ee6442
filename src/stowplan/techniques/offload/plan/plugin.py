"""The frontier with a tier: schedules that recompute some tensors and offload others.

A descent starts at points all along the frontier of recomputation, among them the one that recomputes
nothing, and offloads storages. The result is the frontier of all outcomes and the points of recomputation
together, so a tier never makes a budget slower.

Descent: from a schedule to ever smaller peaks, by offloading one storage after the other.

At each peak a storage must leave: an idle one is offloaded, or a transfer that overlaps the peak is shifted
away from it, whichever costs the fewest seconds per byte. Moves that a smaller peak does not need are undone.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest

import numpy as np

from stowplan.errors import BadUse
from stowplan.plan.frontier import Frontier, Point
from stowplan.plan.judge.simulate import simulate
from stowplan.plan.ledger import steps_of
from stowplan.plan.options import PlanOptions
from stowplan.plan.planner import FRONTIER_EXTENSIONS
from stowplan.plan.pricing import Pricing, Tier
from stowplan.plan.problem import Problem, updated_buffers
from stowplan.plan.steps import Step
from stowplan.techniques.offload.plan.idle_intervals import idle_intervals_of
from stowplan.techniques.offload.plan.insert_transfers import Move, insert_transfers
from stowplan.techniques.offload.plan.transfer_schedule import Caps, Outcome, TransferSchedule
from stowplan.watch import patience

_LEVELS = 24  # peaks that are aimed at, one below the other
_LOOKED_AT = 4  # candidates of each kind that are tried before one is taken
_TRIED_BACK = 48  # moves that are tried to be taken back at each level


def descend(transfers: TransferSchedule, floor_bytes: int, capacity_bytes: int) -> Iterator[Outcome]:
    """Outcomes with smaller and smaller peaks, down to the smallest possible, but not below the floor."""
    descent = _Descent(transfers, capacity_bytes)
    top = descent.now.peak_bytes
    for level in range(1, _LEVELS + 1):
        target = top - (top - floor_bytes) * level // _LEVELS
        yield from descent.reach(target)
        if descent.now.peak_bytes > target:
            break
        yield from descent.take_back(target)


class _Descent:
    """The moves chosen so far and their outcome."""

    def __init__(self, transfers: TransferSchedule, capacity_bytes: int) -> None:
        self._transfers, self._capacity_bytes = transfers, capacity_bytes
        self._chosen: dict[int, Caps] = {}
        self.now = transfers.outcome({})

    def reach(self, target: int) -> Iterator[Outcome]:
        """Choose moves until the peak is within the target, or no more storage can leave it."""
        while self.now.peak_bytes > target:
            tried = [(i, caps, self._with(i, caps)) for i, caps in self._candidates(self.now.peak_step)]
            if not tried:
                return
            i, caps, self.now = min(tried, key=lambda entry: self._price(entry[0], entry[2], target))
            self._chosen[i] = caps
            yield self.now

    def _price(self, i: int, outcome: Outcome, target: int) -> tuple[float, float]:
        """Seconds per byte removed from the excess over the target; among equals the longest idle first."""
        spared = min(self._transfers.intervals[i].nbytes, self.now.peak_bytes - target)
        return (outcome.seconds - self.now.seconds) / spared, -self._transfers.idle_share(i)

    def _with(self, i: int, caps: Caps) -> Outcome:
        return self._transfers.outcome({**self._chosen, i: caps})

    def _candidates(self, peak: int) -> Iterator[tuple[int, Caps]]:
        """The intervals whose storage could leave step `peak`, with the caps that make it leave."""
        transfers, after, before = self._transfers, peak - 1, self._transfers.run_from(peak + 1)
        around = np.flatnonzero((transfers.afters < peak) & (peak < transfers.befores)).tolist()
        new = [i for i in around if i not in self._chosen and self._fits(i)]
        for i in {*nlargest(_LOOKED_AT, new, transfers.idle_share), *nlargest(_LOOKED_AT, new, self._nbytes)}:
            yield i, Caps(after, before)
        moving = {move.interval: move for move in self.now.moves}
        hurried = [
            (i, self._hurried(self._chosen[i], move.out >= peak, after, before))
            for i in around
            if (move := moving.get(transfers.intervals[i])) and not move.out < peak < move.back
        ]
        yield from nlargest(_LOOKED_AT, hurried, lambda pair: self._nbytes(pair[0]))

    def _hurried(self, caps: Caps, is_leaving: bool, after: int, before: int) -> Caps:
        return Caps(min(caps.out, after), caps.back) if is_leaving else Caps(caps.out, max(caps.back, before))

    def _nbytes(self, i: int) -> int:
        return self._transfers.intervals[i].nbytes

    def _fits(self, i: int) -> bool:
        return sum(map(self._nbytes, self._chosen)) + self._nbytes(i) <= self._capacity_bytes

    def take_back(self, target: int) -> Iterator[Outcome]:
        """Undo moves that the target does not need, those with the least idle time first."""
        for i in sorted(self._chosen, key=self._transfers.idle_share)[:_TRIED_BACK]:
            fewer = {j: caps for j, caps in self._chosen.items() if j != i}
            outcome = self._transfers.outcome(fewer)
            if outcome.peak_bytes <= target and outcome.seconds <= self.now.seconds:
                self._chosen, self.now = fewer, outcome
                yield outcome


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
    points, ended = list(frontier.points), frontier.ended
    for number, start in enumerate(_evenly_spaced(frontier.points, _STARTS)):
        over = patience().over
        if number and over:  # the first descent is a part of every answer: some budgets need the tier
            ended = ended or over
            break
        points += _descended(problem, start, pricing, tier, gradients)
    return Frontier(tuple(_undominated(points)), ended)


def _descended(
    problem: Problem, start: Point, pricing: Pricing, tier: Tier, gradients: bool
) -> Iterator[Point]:
    graph, steps = problem.graph, steps_of(problem, start.states)
    baseline = simulate(graph, steps, pricing)
    intervals = idle_intervals_of(graph, steps, gradients=gradients)
    copied = sum(
        graph.tensors[name].nbytes or 0 for name in updated_buffers(graph)
    )  # put back after a failure
    transfers = TransferSchedule(
        steps, intervals, baseline, pricing.seconds, tier, tier.staging_bytes + copied
    )
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
