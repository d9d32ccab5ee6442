"""The plans at the points of one graph's frontier, from the smallest peak to the fastest."""

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from stowplan.ir import Kind, Phase
from stowplan.plan.frontier import Point
from stowplan.plan.judge.simulate import simulate
from stowplan.plan.judge.verify import verify
from stowplan.plan.plan import Plan
from stowplan.plan.planner import Planner
from stowplan.plan.pricing import Pricing
from stowplan.plan.steps import Compute, Free
from stowplan.run.planning.planner import replayed_bytes

_MOST_POINTS = 32  # a frontier is thinned to about as many


@dataclass(frozen=True, slots=True)
class PlannedPoint:
    """A plan, the peaks of its two halves, and the bytes that it keeps between them beyond its inputs."""

    plan: Plan
    forward_bytes: int
    backward_bytes: int
    kept_bytes: int

    @staticmethod
    def of(plan: Plan) -> "PlannedPoint":
        """The figures include the generator states from which the plan repeats random draws."""
        curve, turn, replayed = plan.projected_curve_bytes, _turn(plan), replayed_bytes(plan)
        return PlannedPoint(
            plan,
            forward_bytes=max(curve[: turn + 1]) + replayed,
            backward_bytes=max(curve[turn:]) + replayed,
            kept_bytes=curve[turn] - _given_bytes(plan) + replayed,
        )

    @property
    def peak_bytes(self) -> int:
        """The larger of the two peaks."""
        return max(self.forward_bytes, self.backward_bytes)


class FrontierPlans:
    """The plans of `planner`, simulated with `pricing`, which may assume less workspace."""

    def __init__(self, planner: Planner, pricing: Pricing) -> None:
        self._planner, self._pricing = planner, pricing
        self._points = _thinned(planner.frontier.points)
        self._planned: dict[int, PlannedPoint] = {}

    def point(self, index: int) -> PlannedPoint:
        """The plan at a point, by its index."""
        if index not in self._planned:
            self._planned[index] = PlannedPoint.of(self._plan(self._points[index]))
        return self._planned[index]

    def index_within(self, allowed_bytes: int) -> int:
        """The index of the last point within these bytes, as the planner found them; -1 if there is none."""
        return bisect_right(self._points, allowed_bytes, key=lambda point: point.peak_bytes) - 1

    @property
    def gains(self) -> list[float]:
        """Seconds saved per byte by each point over the one before it; no gain exceeds the one before."""
        gains = (
            (lower.extra_seconds - upper.extra_seconds) / (upper.peak_bytes - lower.peak_bytes)
            for lower, upper in pairwise(self._points)
        )
        return list(accumulate(gains, min))

    def _plan(self, point: Point) -> Plan:
        draft, pricing = self._planner.draft(point.peak_bytes), self._pricing
        curve = simulate(draft.graph, draft.steps, pricing).curve_bytes
        return verify(replace(draft, pricing=pricing, projected_curve_bytes=curve, allowed_bytes=max(curve)))


def _thinned(points: tuple[Point, ...]) -> list[Point]:
    """Points at about even distances in bytes, the first and the last among them."""
    lowest, highest = points[0].peak_bytes, points[-1].peak_bytes
    sizes = (lowest + (highest - lowest) * part // _MOST_POINTS for part in range(_MOST_POINTS + 1))
    places = {bisect_right(points, size, key=lambda point: point.peak_bytes) - 1 for size in sizes}
    return [points[place] for place in sorted(places)]


def _given_bytes(plan: Plan) -> int:
    """The bytes that come from outside: parameters, inputs, incoming gradients."""
    made = {name for op in plan.graph.ops for name in op.writes()}
    outside = (tensor for name, tensor in plan.graph.tensors.items() if name not in made)
    return sum(t.nbytes or 0 for t in outside if t.alias_of is None and t.kind is not Kind.CONSTANT)


def _turn(plan: Plan) -> int:
    """The last step of the forward half."""
    phases = {op.id: op.phase for op in plan.graph.ops}
    last = 0
    for number, step in enumerate(plan.steps):
        if isinstance(step, Compute):
            if phases[step.op] is Phase.BACKWARD:
                break
            last = number
    return last + (last + 1 < len(plan.steps) and isinstance(plan.steps[last + 1], Free))
