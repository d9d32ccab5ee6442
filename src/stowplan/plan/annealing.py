"""Annealing: random changes of one schedule under given budgets, and the archive of all schedules met.

The archive keeps those that no other beats in both peak and ticks. A move changes the state of a value for
the backward half, or of one gap, perhaps with the value's twins in other blocks. While the peak is over the
budget, most moves aim at the values that are in memory there.

`plan/native` does the same in C, some sixty times as fast and to the bit. This is its reference, and the
search where no library was built. Whoever changes one changes both: `tests/plan/native` compares them.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import exp
from random import Random
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from stowplan.plan.ledger import Gaps, Ledger, Policy, State, states_of
from stowplan.plan.problem import Problem

_AT_PEAK = 0.7  # share of moves aimed at the peak while over the budget
_ALONE = 0.1  # share of moves that decide about one gap only; the others about all that follow as well
_TWINS = 0.05  # share of moves that take the twins along
_USUAL = (State.KEEP, State.HOLD, State.EACH)  # what makes sense for all that follows

Twins: TypeAlias = Sequence[tuple[int, ...]]  # groups of gaps at the same place of other blocks
Pause: TypeAlias = Callable[[], None]  # called now and then; it raises to end the work


class Annealer:
    """One schedule, its changes, and the archive."""

    def __init__(self, problem: Problem, twins: Twins) -> None:
        self._ledger, self._random = Ledger(problem), Random(0)
        self._turn = problem.turn
        self._twins = {gap: group for group in twins for gap in group}
        self._peaks: list[int] = []
        self._points: list[tuple[int, Policy]] = []

    @property
    def gaps(self) -> Gaps:
        """The gaps of the problem."""
        return self._ledger.gaps

    def curve_bytes(self) -> NDArray[np.int64]:
        """The highest memory while each op of the present schedule or its chain runs."""
        return self._ledger.curve_bytes()

    def load(self, policy: Policy) -> None:
        """Go on from another schedule."""
        self._ledger.load(states_of(policy))

    def seed(self, seed: int) -> None:
        """Begin another sequence of random numbers."""
        self._random = Random(seed)

    def peak_bytes(self) -> int:
        """The present peak. If nothing beats the present schedule, it goes into the archive."""
        return self._look()[0]

    def offers(self) -> list[tuple[int, int]]:
        """The peaks and extra ticks in the archive: ascending peaks, descending ticks."""
        return [(peak, ticks) for peak, (ticks, _) in zip(self._peaks, self._points, strict=True)]

    def policy_at(self, place: int) -> Policy:
        """The schedule of one of the offers."""
        return self._points[place][1]

    def place_within(self, budget: float) -> int | None:
        """The place of the fastest offer within a budget."""
        place = bisect_right(self._peaks, budget)
        return place - 1 if place else None

    def anneal(self, budgets: Sequence[float], temperature: float, penalty: float, pause: Pause) -> None:
        """A move per budget, or one for its twins as well; a worse one may stay while it is warm.

        A schedule costs its extra ticks, and `penalty` ticks for each byte over the budget.
        """
        ledger = self._ledger
        peak, peak_op = self._look()
        place = 0
        while place < len(budgets):
            pause()
            budget = budgets[place]
            before = ledger.extra_ticks + penalty * max(0.0, peak - budget)
            place += self._change(peak_op if peak > budget else None)
            new_peak, new_op = self._look()
            worse = ledger.extra_ticks + penalty * max(0.0, new_peak - budget) - before
            if worse <= 0 or (temperature > 0 and self._random.random() < exp(-worse / temperature)):
                peak, peak_op = new_peak, new_op
                ledger.commit()
            else:
                ledger.roll_back()

    def keep_what_fits(self, budget: int, pause: Pause) -> None:
        """Keep every dropped value that can be kept within a budget, and costs less so."""
        ledger = self._ledger
        for value in sorted({self.gaps.value_of[g] for g, state in enumerate(ledger.states) if state}):
            pause()
            before = ledger.extra_ticks
            for gap in self.gaps.of(value):
                self._set(gap, State.KEEP)
            if self._look()[0] <= budget and ledger.extra_ticks < before:
                ledger.commit()
            else:
                ledger.roll_back()

    def _change(self, peak_op: int | None) -> int:
        """Decide otherwise about a value for the backward half, or about one gap; perhaps with its twins.

        Returns for how many.
        """
        picked = self._pick(peak_op)
        alone = self._random.random() < _ALONE
        if not alone:
            picked = self.gaps.at(self.gaps.value_of[picked], self._turn)
        choices = [
            state for state in (State if alone else _USUAL) if state is not self._ledger.states[picked]
        ]
        state = self._random.choice(choices)
        alike = self._twins[picked] if self._random.random() < _TWINS else (picked,)
        for twin in alike:
            for gap, wanted in ((twin, state),) if alone else whole_value(self.gaps, twin, state):
                self._set(gap, wanted)
        return len(alike)

    def _set(self, gap: int, state: State) -> None:
        if self._ledger.states[gap] is not state:
            self._ledger.set_state(gap, state)

    def _pick(self, peak_op: int | None) -> int:
        if peak_op is not None and self._random.random() < _AT_PEAK:
            occupied = self._ledger.occupied_across(peak_op)
            if len(occupied):
                return int(occupied[self._random.randrange(len(occupied))])
        return self._random.randrange(len(self.gaps.value_of))

    def _look(self) -> tuple[int, int]:
        """The present peak and its op; a schedule that nothing beats goes into the archive."""
        curve = self._ledger.curve_bytes()
        if not len(curve):
            return 0, 0
        peak_op = int(curve.argmax())
        peak, ticks = int(curve[peak_op]), self._ledger.extra_ticks
        place = bisect_right(self._peaks, peak)
        if place == 0 or self._points[place - 1][0] > ticks:
            self._file(place, peak, ticks)
        return peak, peak_op

    def _file(self, place: int, peak: int, ticks: int) -> None:
        end = place
        while end < len(self._peaks) and self._points[end][0] >= ticks:
            end += 1
        if place and self._peaks[place - 1] == peak:
            place -= 1
        self._peaks[place:end] = [peak]
        self._points[place:end] = [(ticks, bytes(self._ledger.states))]


def whole_value(gaps: Gaps, gap: int, state: State) -> list[tuple[int, State]]:
    """One answer for all gaps of a value: kept before this one; after it kept, or made for each reader."""
    after = State.EACH if state is State.EACH else State.KEEP
    return [(g, State.KEEP if g < gap else state if g == gap else after) for g in gaps.of(gaps.value_of[gap])]
