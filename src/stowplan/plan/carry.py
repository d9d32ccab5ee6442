"""Carrying decisions over: a program that was planned at one size is planned at other sizes at once.

Two graphs are of one program if their outlines are equal: the same ops on the same tensors, with the same
attributes; numbers of elements may differ (`outline_of`). Their gaps are then numbered alike, so a state for
each gap (a policy) of one graph is a schedule of the other. For a graph G, a budget B and the policies P of
a graph that was searched, by ascending memory:

    peak(p, G)      the highest point of the ledger's curve of policy p on G
    take p*       = the last p with peak(p, G) <= B, by bisection, and the one after it   (`carried_point`)
    while peak > B: drop the value at the peak that frees the most bytes per second       (`_drop`)
    then keep each dropped value that can be kept within B                                (`_keep`)

The faster of the two is taken if its seconds are within `GAP` of those without recomputation, or else of the
lower bound, beyond the gap that the searched graph itself was left with. Otherwise the new graph is searched.

Seconds of an op come from the same op at sizes that were measured (`carried_pricing`). With x the roofline's
estimate of an op, and (x1, s1), (x2, s2) measured at the sizes around it:

    s = s1 * (x / x1) ** a,   a = log(s2 / s1) / log(x2 / x1), or 1 where one size was measured

This is exact at measured sizes. Workspace is never extrapolated: it is the smallest that the op had at
a measured size at which no tensor of the step was smaller. If there is no such size, nothing is carried.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stowplan.ir import Attribute, Graph
from stowplan.plan.bound import relaxed_bound_of
from stowplan.plan.frontier import Point
from stowplan.plan.ledger import Gaps, Ledger, Policy, State, gaps_of, states_of
from stowplan.plan.prices import price_by_roofline
from stowplan.plan.pricing import Basis, Machine, Pricing
from stowplan.plan.problem import Problem
from stowplan.plan.select import problem_in_order
from stowplan.plan.steps import RecomputeOp, Step

GAP = 0.03  # seconds above the lower bound, beyond those of the searched graph, with which a policy is taken
_MOST_POLICIES = 48  # of one frontier
_MOST_DROPS = 400  # while a policy is repaired

Outline = tuple[object, ...]


def outline_of(graph: Graph) -> Outline:
    """Everything about a graph but sizes: equal for the graphs of one program."""
    tensors = tuple(
        (t.id, t.kind, t.dtype, t.device, t.gradient_of, t.alias_of, len(t.shape or ()))
        for t in graph.tensors.values()
    )
    ops = tuple(
        (op.id, op.type, op.phase, op.inputs, op.outputs, op.device, op.scope, _without_sizes(op.attributes))
        for op in graph.ops
    )
    return tensors, ops, graph.held


def _without_sizes(value: Attribute) -> object:
    if isinstance(value, Mapping):
        return tuple((key, _without_sizes(value[key])) for key in sorted(value))
    if isinstance(value, tuple):
        return tuple(map(_without_sizes, value))
    return int if type(value) is int else (type(value), value)


@dataclass(frozen=True)
class PlannedSize:
    """A size of a program that was probed and planned: what other sizes take from it."""

    outline: Outline
    graph: Graph
    pricing: Pricing
    nbytes: NDArray[np.int64]  # of each tensor
    estimates: NDArray[np.float64]  # by the roofline, of each op
    policies: tuple[Policy, ...]  # by ascending memory
    again_seconds: float  # of what its plan recomputes
    allowed_bytes: int

    @staticmethod
    def of(
        graph: Graph, pricing: Pricing, points: Sequence[Point], steps: Sequence[Step], allowed_bytes: int
    ) -> "PlannedSize":
        """From a plan's steps and, if it was searched, the points of its frontier; `graph` is in order."""
        every = -(-len(points) // _MOST_POLICIES) or 1
        chosen = [bytes(point.states) for point in points[::-every]][::-1]
        chosen = chosen or [policy_of(problem_in_order(graph, pricing), steps)]
        policies = tuple(dict.fromkeys((*chosen, bytes(len(chosen[0])))))
        again = sum(pricing.seconds[step.op] for step in steps if isinstance(step, RecomputeOp))
        sizes = nbytes_of(graph), estimates_of(graph)
        return PlannedSize(outline_of(graph), graph, pricing, *sizes, policies, again, allowed_bytes)

    @cached_property
    def gap(self) -> float:
        """What its plan was left with above its lower bound; most further sizes do not ask."""
        problem = problem_in_order(self.graph, self.pricing)
        plain = sum(problem.seconds)
        if not plain or not self.again_seconds:
            return 0.0
        bound = relaxed_bound_of(problem, self.allowed_bytes)
        return (plain + self.again_seconds) / (plain + bound) - 1.0


def nbytes_of(graph: Graph) -> NDArray[np.int64]:
    """The bytes of each tensor, in the graph's order."""
    return np.array([tensor.nbytes or 0 for tensor in graph.tensors.values()], dtype=np.int64)


def estimates_of(graph: Graph) -> NDArray[np.float64]:
    """The seconds of each op by a common machine's roofline: only their ratios count."""
    seconds = price_by_roofline(graph, Machine()).seconds
    return np.array([seconds[op.id] for op in graph.ops])


def policy_of(problem: Problem, steps: Sequence[Step]) -> Policy:
    """The states that a list of steps shows: values recomputed in a gap once are held there."""
    gaps, position = gaps_of(problem), {op.id: number for number, op in enumerate(problem.graph.ops)}
    again = [0] * len(gaps.value_of)
    waiting: list[RecomputeOp] = []
    for step in steps:
        if isinstance(step, RecomputeOp):
            waiting.append(step)
        elif waiting and (op := getattr(step, "op", None)) is not None:
            for repeated in waiting:
                for value in problem.writes[position[repeated.op]]:
                    if problem.droppable[value] and problem.owners[value] in repeated.outputs:
                        again[gaps.at(value, position[op])] += 1
            waiting = []
    return bytes(State.KEEP if not count else State.HOLD if count == 1 else State.EACH for count in again)


def carried_pricing(graph: Graph, measured: Sequence[PlannedSize]) -> Pricing | None:
    """Prices for another size of a program; None where no measured size is as large in every tensor.

    `measured` are sizes of the same program whose ops were probed.
    """
    nbytes, estimates = nbytes_of(graph), estimates_of(graph)
    larger = [size for size in measured if bool((nbytes <= size.nbytes).all())]
    if not larger:
        return None
    ids = [op.id for op in graph.ops]
    workspaces = np.array([[size.pricing.workspace_bytes.get(op, 0) for op in ids] for size in larger])
    seconds = _interpolated(estimates, measured, ids)
    return Pricing(
        dict(zip(ids, seconds.tolist(), strict=True)),
        Basis.MEASURED,
        dict(zip(ids, workspaces.min(axis=0).tolist(), strict=True)),
    )


def _interpolated(
    estimates: NDArray[np.float64], measured: Sequence[PlannedSize], ids: Sequence[str]
) -> NDArray[np.float64]:
    """Seconds between those of the sizes around, on a line in logarithms."""
    total = float(estimates.sum())
    by_total = sorted(measured, key=lambda size: float(size.estimates.sum()))
    below = [size for size in by_total if float(size.estimates.sum()) <= total][-1:] or by_total[:1]
    above = [size for size in by_total if float(size.estimates.sum()) >= total][:1] or by_total[-1:]
    one, other = (_seconds(size, ids) for size in (below[0], above[0]))
    exponent = np.ones(len(ids))
    spread = np.log(above[0].estimates / below[0].estimates)
    known = (np.abs(spread) > 1e-9) & (one > 0) & (other > 0)
    exponent[known] = np.clip(np.log(other[known] / one[known]) / spread[known], 0.0, 2.0)
    near = one if below[0] is above[0] else np.where(known | (one > 0), one, other)
    base = below[0].estimates
    return np.asarray(near * (estimates / base) ** exponent)


def _seconds(size: PlannedSize, ids: Sequence[str]) -> NDArray[np.float64]:
    return np.array([size.pricing.seconds[op] for op in ids])


def carried_point(problem: Problem, policies: Sequence[Policy], allowed_bytes: int) -> Point | None:
    """The fastest schedule within the budget that the policies lead to; None if they lead to none."""
    gaps = gaps_of(problem)
    fitting = [policy for policy in policies if len(policy) == len(gaps.value_of)]
    if not fitting:
        return None
    ledger = Ledger(problem)
    first, last = 0, len(fitting)  # all before `first` fit, as far as they were looked at; `last` does not
    while first < last:
        middle = (first + last) // 2
        if _peak_of(ledger, fitting[middle]) <= allowed_bytes:
            first = middle + 1
        else:
            last = middle
    found = [
        _repaired(ledger, gaps, fitting[place], allowed_bytes)
        for place in (first - 1, first)
        if 0 <= place < len(fitting)
    ]
    return min((p for p in found if p is not None), key=lambda point: point.extra_seconds, default=None)


def _peak_of(ledger: Ledger, policy: Policy) -> int:
    ledger.load(states_of(policy))
    return int(ledger.curve_bytes().max(initial=0))


def _repaired(ledger: Ledger, gaps: Gaps, policy: Policy, allowed_bytes: int) -> Point | None:
    """The policy with more dropped until it is within the budget, and then with all kept that can be."""
    if _peak_of(ledger, policy) > allowed_bytes and not _drop(ledger, gaps, allowed_bytes):
        return None
    _keep(ledger, gaps, allowed_bytes)
    peak = int(ledger.curve_bytes().max(initial=0))
    return Point(peak, ledger.extra_seconds, tuple(ledger.states)) if peak <= allowed_bytes else None


def _drop(ledger: Ledger, gaps: Gaps, allowed_bytes: int) -> bool:
    """Drop values at the peak, the most bytes per second first; whether the budget is met."""
    problem, tried = ledger.problem, set[int]()
    for _ in range(_MOST_DROPS):
        curve = ledger.curve_bytes()
        peak_op = int(curve.argmax())
        if curve[peak_op] <= allowed_bytes:
            return True
        here = [int(gap) for gap in ledger.occupied_across(peak_op)]
        here = [gap for gap in here if gap not in tried and ledger.states[gap] is not State.EACH]
        if not here:
            return False
        gain = {gap: _bytes_per_second(problem, gaps.value_of[gap]) for gap in here}
        gap = max(here, key=lambda each: (gain[each], -each))
        state = State.HOLD if ledger.states[gap] is State.KEEP else State.EACH
        if state is State.EACH:
            tried.add(gap)
        level, seconds = int(curve[peak_op]), ledger.extra_seconds
        ledger.set_state(gap, state)
        after = ledger.curve_bytes()
        worse = int(after.max()) > level or int(after[peak_op]) >= level
        if worse and ledger.extra_seconds >= seconds:
            ledger.roll_back()
            tried.add(gap)
        else:
            ledger.commit()
    return False


def _bytes_per_second(problem: Problem, value: int) -> float:
    return problem.nbytes[value] / max(problem.seconds[problem.producer[value]], 1e-9)


def _keep(ledger: Ledger, gaps: Gaps, allowed_bytes: int) -> None:
    """Keep dropped values, the most seconds first, where the curve has room for them."""
    problem = ledger.problem
    values = {gaps.value_of[gap] for gap, state in enumerate(ledger.states) if state}
    for value in sorted(values, key=lambda v: (-problem.seconds[problem.producer[v]], v)):
        dropped = [gap for gap in gaps.of(value) if ledger.states[gap]]
        start, end = gaps.start(dropped[0]) + 1, gaps.uses[value][-1]
        curve = ledger.curve_bytes()[start:end]
        if len(curve) and int(np.median(curve)) + problem.nbytes[value] > allowed_bytes:
            continue
        seconds = ledger.extra_seconds
        for gap in dropped:
            ledger.set_state(gap, State.KEEP)
        if int(ledger.curve_bytes().max()) <= allowed_bytes and ledger.extra_seconds < seconds:
            ledger.commit()
        else:
            ledger.roll_back()
