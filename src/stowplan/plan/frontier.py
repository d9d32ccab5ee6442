"""Frontier: budget against time, found once for all budgets, and a lower bound on that time.

Every schedule met during the search is offered to an archive that keeps those no other beats in both peak and
seconds. A budget is answered by looking it up, so larger budgets never cost more time, smaller ones never
more memory, and the same graph always gives the same plans.

The search: for each of some budgets it starts from the values that cross the baseline's peak in the optimum
of the bound, and continues by simulated annealing on the Ledger. Then the budget moves slowly between the
baseline's peak and the floor, through the ranges where the start did not meet its bound: a good schedule for
one budget is a few changes away from a good one for the next. The range just above the floor comes last, at a
higher temperature. If the current peak is over the current budget, a move changes a value that is in memory
at the peak; otherwise any value. In networks of repeated blocks the same change may be applied to a value's
twins in other blocks. At points along the archive, every value that can be kept within the point's peak is
then kept. Further runs, from the baseline and with other random numbers, add to the archive: near the floor
one run alone may miss a few per cent.

`focus_on` searches for one budget alone: after the start it begins again from the baseline, the budget falls
slowly to the floor, and stays at the one that is asked for; a few times, with other random numbers. If its
best is near enough to the bound, nobody needs the rest.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from re import sub

import numpy as np

from stowplan.plan.annealing import whole_value
from stowplan.plan.bound import Crossings
from stowplan.plan.ledger import Ledger, State, gaps_of, states_of, steps_of
from stowplan.plan.native.annealer import annealer_of
from stowplan.plan.problem import Problem, ticks_of
from stowplan.plan.steps import Step
from stowplan.watch import Searching, patience, tell

_ANCHORS = 16  # budgets that get a start of their own
_SMALL = 50  # droppable values up to which starts are optima in whole numbers, which take no time
_SETTLED = 0.001  # of the baseline's seconds: a budget this near to its bound needs no further search
_SWEEPS = 6
_HEATS = (-1.5, -1.0, -0.5)  # cooling of the last sweeps: so hot that a higher peak may come before a lower
_RUNS = 3
_OF_A_START, _OF_A_SWEEP = 0.3 / _ANCHORS, 0.6 / _RUNS / (_SWEEPS + len(_HEATS))  # of the time, roughly
_DESCENTS = ((0, 1.0, 2000), (0, 0.5, 2000), (1, 1.0, 4000), (1, 0.5, 4000))  # seed, cooling, moves each way
_LONG_DESCENT = 8000  # moves each way of further descents
_CHEAP = 0.05  # of an average op: cheap enough to run for every reader
_HOT, _COLD = 0.1, 0.007  # temperatures, in times of an average droppable value's op
_PENALTY = 4.0  # price of exceeding the budget by the baseline's whole peak, in times of the baseline
_CHUNKS = 8  # how often a start is looked at, whether it is good enough


@dataclass(frozen=True, slots=True)
class Point:
    """One schedule: its peak, its extra seconds over the baseline, and a state per gap."""

    peak_bytes: int
    extra_seconds: float
    states: tuple[State, ...]

    def steps(self, problem: Problem) -> tuple[Step, ...]:
        """The steps of the schedule."""
        return steps_of(problem, self.states)


@dataclass(frozen=True, slots=True)
class Frontier:
    """Points by ascending peak and descending seconds. The first is the smallest budget that was reached."""

    points: tuple[Point, ...]
    ended: str = ""  # what ended the search early, if anything did

    def at(self, allowed_bytes: int) -> Point | None:
        """The fastest point that stays within `allowed_bytes`; None if none does."""
        reached = bisect_right(self.points, allowed_bytes, key=lambda point: point.peak_bytes)
        return self.points[reached - 1] if reached else None


def frontier_of(problem: Problem, moves: int | None = None) -> Frontier:
    """Search all budgets between the floor and the baseline's peak; deterministic."""
    search = _Search(problem)
    try:
        _search_all(search, default_moves(problem) if moves is None else moves)
    except _Over as over:
        return replace(search.frontier(), ended=str(over))
    return search.frontier()


def _search_all(search: "_Search", total: int) -> None:
    if search.has_room():
        anchors = [(number + 1) / (_ANCHORS + 1) for number in range(_ANCHORS)]
        settled = [search.start_at(share, moves=total // 4 // _ANCHORS) for share in anchors]
        stretches = _unsettled([0.0, *anchors, 1.0], [True, *settled, False])
        for run in range(_RUNS):
            if run:
                search.restart(run)
            for number in range(_SWEEPS):
                search.sweep(
                    stretches, total * 3 // 4 // _SWEEPS, cooling=number / (_SWEEPS - 1), down=number % 2 == 1
                )
            for cooling in _HEATS:
                search.sweep([(anchors[-1], 1.0)], total // 5, cooling, down=True)
            search.quench(attempts=max(1, total // 8))


def focus_on(
    problem: Problem, allowed_bytes: int, moves: int | None = None, *, gap: float = 0.0, further: int = 0
) -> tuple[Frontier, float]:
    """Schedules near one budget, and a lower bound on the extra seconds of all schedules within it.

    The search ends when the best is at most the share `gap` above the bound, and goes on with as many other
    seeds as `further` says.
    """
    beyond = [(seed, cooling, _LONG_DESCENT) for seed in range(2, 2 + further) for cooling in (0.5, 0.25)]
    search = _Search(problem)
    total = default_moves(problem) if moves is None else moves
    with suppress(_Over):  # whoever asks sees the gap, and that there is no time for more
        settled, seed = search.start(allowed_bytes, total // _ANCHORS, gap), 0
        for other_seed, cooling, of_a_descent in (*_DESCENTS, *beyond):
            if settled:
                break
            if other_seed != seed:
                search.restart(seed := other_seed)
            search.descend(allowed_bytes, min(of_a_descent, total // 8), cooling)
            settled = search.is_settled(allowed_bytes, gap)
    return search.frontier(), search.bound_within(allowed_bytes)


def baseline_of(problem: Problem) -> Frontier:
    """A frontier of one point: the schedule that keeps every value."""
    ledger = Ledger(problem)
    peak = int(ledger.curve_bytes().max(initial=0))
    return Frontier((Point(peak, ledger.extra_seconds, tuple(ledger.states)),))


def default_moves(problem: Problem) -> int:
    """Enough to settle small graphs, and a bounded time on large ones, where a move touches more."""
    return min(40_000, 24_000_000 // max(1, len(problem.reads)))


def _unsettled(shares: list[float], settled: list[bool]) -> list[tuple[float, float]]:
    """The stretches between neighbouring shares of which not both are settled."""
    ends = zip(pairwise(shares), pairwise(settled), strict=True)
    return [stretch for stretch, done in ends if not all(done)]


class _Over(Exception):
    """Somebody ended the search."""


class _Search:
    """One annealing run and the archive of what it met. It counts in ticks, and says seconds."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._patience = problem, patience()
        self._annealer = annealer_of(problem, twins_of(problem))
        self._gaps = self._annealer.gaps
        self._ticks, self._tick_seconds = ticks_of(problem)
        self._floor_bytes = floor_of(problem)
        makers = {problem.producer[value] for value in self._gaps.value_of}
        costly = [self._ticks[op] for op in makers if self._ticks[op]]
        self._warmth = sum(costly) / max(1, len(costly))
        self._bounds: list[tuple[float, float]] = []  # budgets, and what no schedule within them can avoid
        self._share = 0.0
        self._plain_bytes, self._plain_ticks = self._annealer.peak_bytes(), sum(self._ticks)
        backward = self._annealer.curve_bytes()[problem.turn :]
        self._cut = Crossings(problem, problem.turn + (int(backward.argmax()) if len(backward) else 0))
        self._penalty = _PENALTY * (self._plain_ticks or 1) / max(1, self._plain_bytes)

    def frontier(self) -> Frontier:
        """The frontier of all schedules in the archive."""
        self._advance(0.0)  # with what was met last
        return Frontier(
            tuple(
                Point(peak, seconds, states_of(self._annealer.policy_at(place)))
                for place, (peak, seconds) in enumerate(self._offers())
            )
        )

    def _advance(self, share: float) -> None:
        """Report the points so far to the watcher, before a part that takes `share` of the search."""
        plain_seconds = self._plain_ticks * self._tick_seconds
        tell(lambda: Searching(self._share, plain_seconds, self._offers(), tuple(self._bounds)))
        self._share += share

    def _offers(self) -> list[tuple[int, float]]:
        return [(peak, ticks * self._tick_seconds) for peak, ticks in self._annealer.offers()]

    def has_room(self) -> bool:
        """Whether the peak is above the floor, and so can be lowered at all."""
        return self._floor_bytes < self._plain_bytes and any(self._problem.droppable)

    def start_at(self, share: float, moves: int) -> bool:
        """Start from a budget this far down; whether the result met the bound, so that nothing is to gain."""
        return self.start(self._budget_at(share), moves)

    def start(self, budget: float, moves: int, gap: float = 0.0) -> bool:
        """Take the best crossing of the baseline's peak for a budget, and anneal from there.

        Returns whether the result met the bound, or is at most `gap` above it.
        """
        crossing = self._cut.within(int(budget), whole=sum(self._problem.droppable) <= _SMALL)
        self._bounds.append((budget, crossing.seconds))
        self._advance(_OF_A_START)
        self._cross_with(crossing.kept)
        for _ in range(_CHUNKS):
            if self.is_settled(budget, gap):
                return True
            self._anneal([budget] * (moves // _CHUNKS), cooling=0.5)
        return self.is_settled(budget, gap)

    def restart(self, seed: int) -> None:
        """Go back to the baseline, with other random numbers; the archive stays."""
        self._annealer.load(bytes(len(self._gaps.value_of)))
        self._annealer.seed(seed)

    def descend(self, budget: int, moves: int, cooling: float) -> None:
        """From the baseline, lower the budget slowly to the floor; then anneal at this budget, cold."""
        self._advance(_OF_A_START)
        self._annealer.load(bytes(len(self._gaps.value_of)))
        self._anneal([self._budget_at(move / moves) for move in range(moves)], cooling)
        self._anneal([float(budget)] * moves, cooling=1.0)
        if (place := self._annealer.place_within(budget)) is not None:
            self._annealer.load(self._annealer.policy_at(place))
            self._annealer.keep_what_fits(budget, self._refuse_if_over)

    def bound_within(self, allowed_bytes: float) -> float:
        """Extra seconds that no schedule within a budget can avoid, as far as it is known."""
        return max((seconds for budget, seconds in self._bounds if budget >= allowed_bytes), default=0.0)

    def _cross_with(self, kept: frozenset[int]) -> None:
        """Let of all values only these be in memory across the cut."""
        states = [State.KEEP] * len(self._gaps.value_of)
        for value in set(self._gaps.value_of):
            crossed = self._gaps.at(value, self._cut.place + 1)
            if value not in kept and crossed + 1 < self._gaps.first[value + 1]:
                for gap, state in whole_value(self._gaps, crossed, self._dropped(value, kept)):
                    states[gap] = state
        self._annealer.load(bytes(states))

    def is_settled(self, budget: float, gap: float = 0.0) -> bool:
        """Whether a schedule within the budget is as fast as the bound on it, or at most `gap` above."""
        self._annealer.peak_bytes()
        place = self._annealer.place_within(budget)
        bound = self.bound_within(budget) / self._tick_seconds
        near = bound + max(_SETTLED * self._plain_ticks, gap * (self._plain_ticks + bound))
        return place is not None and self._annealer.offers()[place][1] <= near

    def sweep(self, stretches: list[tuple[float, float]], moves: int, cooling: float, down: bool) -> None:
        """One pass of the budget over the stretches, towards the floor or back; `moves` for all there is."""
        self._advance(_OF_A_SWEEP)
        shares = [
            low + (high - low) * move / count
            for low, high in stretches
            if (count := int(moves * (high - low)) + 1)
            for move in range(count)
        ]
        self._anneal([self._budget_at(share) for share in (shares if down else shares[::-1])], cooling)

    def quench(self, attempts: int) -> None:
        """From points all along the archive, keep every value that can be kept within the point's peak."""
        points = [(peak, self._annealer.policy_at(n)) for n, (peak, _) in enumerate(self._annealer.offers())]
        dropped = sum(len(policy) - policy.count(State.KEEP) for _, policy in points)
        for peak, policy in points[:: -(-max(1, dropped) // attempts)]:
            self._refuse_if_over()
            self._annealer.load(policy)
            self._annealer.keep_what_fits(peak, self._refuse_if_over)

    def _budget_at(self, share: float) -> float:
        return self._plain_bytes + share * (self._floor_bytes - self._plain_bytes)

    def _dropped(self, value: int, kept: frozenset[int]) -> State:
        """Values that are made cheaply from what is kept are made for each reader, others once."""
        problem = self._problem
        maker = problem.producer[value]
        at_hand = all(read in kept or not problem.droppable[read] for read in problem.reads[maker])
        cheap = self._ticks[maker] < _CHEAP * self._warmth
        return State.EACH if cheap and at_hand else State.HOLD

    def _anneal(self, budgets: list[float], cooling: float) -> None:
        temperature = self._warmth * _HOT * (_COLD / _HOT) ** cooling
        self._annealer.anneal(budgets, temperature, self._penalty, self._refuse_if_over)

    def _refuse_if_over(self) -> None:
        if over := self._patience.over:
            raise _Over(over)


def floor_of(problem: Problem, without: Container[int] = ()) -> int:
    """A lower bound on the peak of any choice of states: values that must stay, and each op's operands.

    The ops in `without`, and what they make, do not count.
    """
    ops = len(problem.reads)
    last = list(problem.producer)
    for op, values in enumerate(problem.reads):
        for value in values:
            last[value] = op
    through = np.zeros(ops + 1, dtype=np.int64)
    for value, nbytes in enumerate(problem.nbytes):
        if not problem.droppable[value] and problem.producer[value] not in without:
            start, end = problem.producer[value] + 1, ops if problem.held[value] else last[value]
            through[start : max(start, end)] += nbytes
    return problem.standing_bytes + max(
        (int(through[op]) + _own_bytes(problem, op, last) for op in range(ops) if op not in without),
        default=0,
    )


def _own_bytes(problem: Problem, op: int, last: list[int]) -> int:
    """The bytes of `op` beyond the values that are counted as living across it."""
    own = sum(
        problem.nbytes[value]
        for value in (*problem.reads[op], *problem.writes[op])
        if problem.droppable[value] or problem.producer[value] == op or last[value] == op
    )
    spared = sum(problem.nbytes[target] for target, _ in problem.in_place[op])
    return own + problem.temporary_bytes[op] - spared


def twins_of(problem: Problem) -> list[tuple[int, ...]]:
    """Groups of gaps at the same place in other blocks; each gap is in one."""
    gaps = gaps_of(problem)
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for gap, value in enumerate(gaps.value_of):
        op = problem.producer[value]
        scope = sub(r"\d+", "#", problem.graph.ops[op].scope)
        place = (gap - gaps.first[value], len(gaps.uses[value]), problem.writes[op].index(value))
        groups[(problem.graph.ops[op].type, scope, problem.nbytes[value], *place)].append(gap)
    return [tuple(group) for group in groups.values()]
