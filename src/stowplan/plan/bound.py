"""A lower bound on the extra seconds of any schedule that keeps the graph's order within a budget.

Cut the order at one op s after the turn and consider only the values that cross the cut. Let k_v be the share
of forward value v that crosses it, and r_o the share of forward op o that is recomputed after it:

    minimise    sum of seconds_o * r_o
    subject to  k_v + r_maker(v) >= 1          v is read by an op after s           (_needed_later)
                k_u + r_maker(u) >= r_o        u is read by o                       (_needed_again)
                sum of bytes_v * k_v <= room   what the budget leaves at s          (_room_at)

Every schedule within the budget gives such k and r for every s, so the largest optimum over some cuts is a
bound. The operands and results of s are in memory at s in any case and take no room.
"""

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from stowplan.plan.ledger import Ledger
from stowplan.plan.problem import Problem

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_CUTS = 8
_LARGE = 1500  # droppable values from which on the bound stays fractional
_NODES = 200  # of the branching: a limit in seconds would make plans differ from run to run


def bound_of(problem: Problem, allowed_bytes: int, *, enough: float = inf) -> float:
    """Extra seconds that no schedule in this order can avoid under `allowed_bytes`.

    A bound that is at least `enough` seconds is not made closer.
    """
    curve = Ledger(problem).curve_bytes()
    over = [op for op in range(problem.turn, len(curve)) if curve[op] > allowed_bytes]
    highest = sorted(over, key=lambda op: -curve[op])
    cuts = sorted({*highest[:2], *highest[:: max(1, len(over) // _CUTS)]})
    relaxed: dict[int, float] = {}
    for cut in cuts:
        relaxed[cut] = crossing_at(problem, cut, allowed_bytes).seconds
        if relaxed[cut] >= enough:
            return relaxed[cut]
    best = max(relaxed.values(), default=0.0)
    if sum(problem.droppable) <= _LARGE:
        for cut in sorted(cuts, key=lambda cut: -relaxed[cut])[:2]:
            best = max(best, crossing_at(problem, cut, allowed_bytes, whole=True).seconds)
            if best >= enough:
                break
    return best


def relaxed_bound_of(problem: Problem, allowed_bytes: int) -> float:
    """A weaker bound in a fraction of the time: at few cuts, and fractions are let be."""
    curve = Ledger(problem).curve_bytes()
    over = [op for op in range(problem.turn, len(curve)) if curve[op] > allowed_bytes]
    highest = sorted(over, key=lambda op: -curve[op])
    cuts = {*highest[:1], *highest[:: max(1, len(over) // 2)][:2]}
    return max((crossing_at(problem, cut, allowed_bytes).seconds for cut in sorted(cuts)), default=0.0)


@dataclass(frozen=True, slots=True)
class Crossing:
    """The best at one cut: a lower bound on its seconds, and the forward values that cross it."""

    seconds: float
    kept: frozenset[int]


def crossing_at(problem: Problem, cut: int, allowed_bytes: int, *, whole: bool = False) -> Crossing:
    """The cheapest way across one cut; `whole` forbids fractions, as far as some branching gets."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # here: half a second that only planning needs

    values = [value for value, droppable in enumerate(problem.droppable) if droppable]
    column = {value: index for index, value in enumerate(values)}
    ops = len(values)  # the columns after the values are the forward ops
    weight = np.array([0 if value in problem.reads[cut] else problem.nbytes[value] for value in values])
    rows = [*_needed_later(problem, cut, column, ops), *_needed_again(problem, column, ops)]
    unit_bytes = max(1, int(weight.max(initial=1)))
    rows.append(
        (
            [(col, -float(w) / unit_bytes) for col, w in enumerate(weight) if w],
            -max(0, _room_at(problem, cut, allowed_bytes)) / unit_bytes,
        )
    )
    seconds = np.concatenate([np.zeros(ops), problem.seconds[: problem.turn]])
    unit_seconds = float(seconds.max(initial=0.0)) or 1.0
    found = milp(
        seconds / unit_seconds,
        constraints=LinearConstraint(_matrix(rows, len(seconds)), lb=np.array([least for _, least in rows])),
        bounds=Bounds(0, 1),
        integrality=np.full(len(seconds), int(whole)),
        options={"node_limit": _NODES, "mip_rel_gap": 0.001},
    )
    least = found.mip_dual_bound if whole else found.fun
    crossing = found.x if found.x is not None else np.zeros(len(seconds))
    kept = frozenset(value for value, col in column.items() if crossing[col] > 0.5)
    return Crossing(max(0.0, least or 0.0) * unit_seconds, kept)


Row = tuple[list[tuple[int, float]], float]  # terms and the least their sum may be


def _matrix(rows: list[Row], columns: int) -> "csr_array":
    from scipy.sparse import csr_array

    starts = np.cumsum([0, *(len(terms) for terms, _ in rows)])
    terms = [term for row, _ in rows for term in row]
    data, cols = np.array([sign for _, sign in terms]), np.array([col for col, _ in terms])
    return csr_array((data, cols, starts), shape=(len(rows), columns))


def _needed_later(problem: Problem, cut: int, column: dict[int, int], ops: int) -> list[Row]:
    later = {value for op in range(cut + 1, len(problem.reads)) for value in problem.reads[op]}
    return [([(column[v], 1.0), (ops + problem.producer[v], 1.0)], 1.0) for v in sorted(later) if v in column]


def _needed_again(problem: Problem, column: dict[int, int], ops: int) -> list[Row]:
    return [
        ([(column[u], 1.0), (ops + problem.producer[u], 1.0), (ops + op, -1.0)], 0.0)
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
