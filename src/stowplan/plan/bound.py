"""The bound: extra seconds that no schedule of the order can avoid within a budget.

Cut the order at one op s after the turn and consider only the values that cross the cut. Let k_v be the share
of forward value v that crosses it, and r_o the share of forward op o that is recomputed after:

    minimise    sum of seconds_o * r_o
    subject to  k_v + r_maker(v) >= 1          v is read by an op after s           (_needed_later)
                k_u + r_maker(u) >= r_o        u is read by o                       (_needed_again)
                sum of bytes_v * k_v <= room   what the budget leaves at s          (_room_at)

Every schedule within the budget gives such k and r for every s, so the largest optimum over some cuts is a
bound. The operands and results of s are in memory at s in any case and take no room. What crosses the
baseline's peak in an optimum is where a search starts.
"""

from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from stowplan.plan.highs import Floats, LinearProgram, Places
from stowplan.plan.ledger import Ledger
from stowplan.plan.problem import Problem

_CUTS = 8
_FRACTIONAL = (
    250  # droppable values from which on the bound stays fractional: hardly less, and seconds earlier
)


def bound_of(problem: Problem, allowed_bytes: int, *, enough: float = inf) -> float:
    """Extra seconds that no schedule in this order can avoid under `allowed_bytes`.

    A bound that is at least `enough` seconds is not made closer.
    """
    curve = Ledger(problem).curve_bytes()
    over = [op for op in range(problem.turn, len(curve)) if curve[op] > allowed_bytes]
    highest = sorted(over, key=lambda op: -curve[op])
    cuts = {
        cut: Crossings(problem, cut)
        for cut in sorted({*highest[:2], *highest[:: max(1, len(over) // _CUTS)]})
    }
    relaxed: dict[int, float] = {}
    for place, cut in cuts.items():
        relaxed[place] = cut.within(allowed_bytes).seconds
        if relaxed[place] >= enough:
            return relaxed[place]
    best = max(relaxed.values(), default=0.0)
    if sum(problem.droppable) <= _FRACTIONAL:
        for place in sorted(cuts, key=lambda place: -relaxed[place])[:2]:
            best = max(best, cuts[place].within(allowed_bytes, whole=True).seconds)
            if best >= enough:
                break
    return best


def relaxed_bound_of(problem: Problem, allowed_bytes: int) -> float:
    """A weaker bound in a fraction of the time: at few cuts, and fractions are let be."""
    curve = Ledger(problem).curve_bytes()
    over = [op for op in range(problem.turn, len(curve)) if curve[op] > allowed_bytes]
    highest = sorted(over, key=lambda op: -curve[op])
    cuts = {*highest[:1], *highest[:: max(1, len(over) // 2)][:2]}
    return max((Crossings(problem, cut).within(allowed_bytes).seconds for cut in sorted(cuts)), default=0.0)


@dataclass(frozen=True, slots=True)
class Crossing:
    """The best at one cut: a lower bound on its seconds, and the forward values that cross it."""

    seconds: float
    kept: frozenset[int]


@dataclass(frozen=True)
class Crossings:
    """The ways across one cut. Their program is built once; a budget changes one number of it."""

    problem: Problem
    place: int

    def within(self, allowed_bytes: int, *, whole: bool = False) -> Crossing:
        """The cheapest within a budget; `whole` forbids fractions, as far as some branching gets."""
        program, least = self._program
        room = max(0, _room_at(self.problem, self.place, allowed_bytes))
        bound, shares = program.solved(np.append(least, -room / self._unit_bytes), whole=whole)
        if shares is None:
            return Crossing(max(0.0, bound) * self._unit_seconds, frozenset())
        kept = frozenset(value for value, share in zip(self._values, shares, strict=False) if share > 0.5)
        return Crossing(max(0.0, bound) * self._unit_seconds, kept)

    @cached_property
    def _values(self) -> list[int]:
        """The values that have a column; the columns after theirs are the forward ops."""
        return [value for value, droppable in enumerate(self.problem.droppable) if droppable]

    @cached_property
    def _weights(self) -> list[int]:
        here = self.problem.reads[self.place]
        return [0 if value in here else self.problem.nbytes[value] for value in self._values]

    @cached_property
    def _unit_bytes(self) -> int:
        return max([1, *self._weights])

    @cached_property
    def _unit_seconds(self) -> float:
        return max(self.problem.seconds[: self.problem.turn], default=0.0) or 1.0

    @cached_property
    def _program(self) -> tuple[LinearProgram, Floats]:
        """The program, and the least of its rows but for the last, which is the room."""
        column = {value: place for place, value in enumerate(self._values)}
        ops = len(column)
        later = _needed_later(self.problem, self.place, column, ops)
        rows = [*later, *_needed_again(self.problem, column, ops)]
        rows.append(
            [(place, -weight / self._unit_bytes) for place, weight in enumerate(self._weights) if weight]
        )
        seconds = np.concatenate([np.zeros(ops), self.problem.seconds[: self.problem.turn]])
        least = np.concatenate([np.ones(len(later)), np.zeros(len(rows) - 1 - len(later))])
        return LinearProgram.of(seconds / self._unit_seconds, _terms(rows)), least


Row = list[tuple[int, float]]  # columns and factors


def _terms(rows: list[Row]) -> tuple[Places, Places, Floats]:
    numbers = np.repeat(np.arange(len(rows), dtype=np.int32), [len(row) for row in rows])
    columns = np.array([column for row in rows for column, _ in row], dtype=np.int32)
    return numbers, columns, np.array([factor for row in rows for _, factor in row], dtype=np.float64)


def _needed_later(problem: Problem, cut: int, column: dict[int, int], ops: int) -> list[Row]:
    later = {value for op in range(cut + 1, len(problem.reads)) for value in problem.reads[op]}
    return [[(column[v], 1.0), (ops + problem.producer[v], 1.0)] for v in sorted(later) if v in column]


def _needed_again(problem: Problem, column: dict[int, int], ops: int) -> list[Row]:
    return [
        [(column[u], 1.0), (ops + problem.producer[u], 1.0), (ops + op, -1.0)]
        for op in range(problem.turn)
        for u in problem.reads[op]
        if u in column
    ]


def _room_at(problem: Problem, cut: int, allowed_bytes: int) -> int:
    """Bytes left at the cut beside what is there in every schedule."""
    fixed = set(problem.reads[cut]) | set(problem.writes[cut])
    later = {value for op in range(cut + 1, len(problem.reads)) for value in problem.reads[op]}
    for value, droppable in enumerate(problem.droppable):
        made_before = problem.producer[value] < cut
        if not droppable and made_before and (problem.held[value] or value in later):
            fixed.add(value)
    spared = sum(problem.nbytes[target] for target, _ in problem.in_place[cut])
    return (
        allowed_bytes
        - problem.standing_bytes
        - sum(problem.nbytes[value] for value in fixed)
        - problem.temporary_bytes[cut]
        + spared
    )
