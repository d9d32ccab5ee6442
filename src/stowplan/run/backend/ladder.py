"""Ladder: the plans of one graph, from the smallest on rung 0 to the fastest on the last."""

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from stowplan.ir import Kind, Phase
from stowplan.plan.decision import Compute, Free
from stowplan.plan.frontier import Point
from stowplan.plan.judge.simulate import simulate
from stowplan.plan.judge.verify import verify
from stowplan.plan.plan import Plan
from stowplan.plan.planner import Planner
from stowplan.plan.pricing import Pricing
from stowplan.run.planning.price import replayed_bytes

_RUNGS = 32  # a frontier is thinned to about as many


@dataclass(frozen=True, slots=True)
class Rung:
    """A plan, the most its halves have at once, and what it keeps between them besides what it is given."""

    plan: Plan
    forward_bytes: int
    backward_bytes: int
    kept_bytes: int

    @staticmethod
    def of(plan: Plan) -> "Rung":
        """All figures with the states that the plan replays draws from."""
        curve, turn, replayed = plan.projected_curve_bytes, _turn(plan), replayed_bytes(plan)
        return Rung(
            plan,
            forward_bytes=max(curve[: turn + 1]) + replayed,
            backward_bytes=max(curve[turn:]) + replayed,
            kept_bytes=curve[turn] - _given_bytes(plan) + replayed,
        )

    @property
    def peak_bytes(self) -> int:
        """The most it has at once."""
        return max(self.forward_bytes, self.backward_bytes)


class Ladder:
    """Plans that `planner` makes, told with `pricing`, which may assume less of others than the planner's."""

    def __init__(self, planner: Planner, pricing: Pricing) -> None:
        self._planner, self._pricing = planner, pricing
        self._points = _thinned(planner.frontier.points)
        self._rungs: dict[int, Rung] = {}

    def rung(self, height: int) -> Rung:
        """The rung at this height."""
        if height not in self._rungs:
            self._rungs[height] = Rung.of(self._plan(self._points[height]))
        return self._rungs[height]

    def height_within(self, allowed_bytes: int) -> int:
        """The highest rung that the planner found to be within so many bytes; -1 if there is none."""
        return bisect_right(self._points, allowed_bytes, key=lambda point: point.peak_bytes) - 1

    @property
    def gains(self) -> list[float]:
        """Seconds saved per byte by each rung over the one below; those after a poor one count no more."""
        gains = (
            (lower.extra_seconds - upper.extra_seconds) / (upper.peak_bytes - lower.peak_bytes)
            for lower, upper in pairwise(self._points)
        )
        return list(accumulate(gains, min))

    def _plan(self, point: Point) -> Plan:
        plan, pricing = self._planner.plan(point.peak_bytes), self._pricing
        curve = simulate(plan.graph, plan.steps, pricing.seconds, pricing.workspace_bytes).curve_bytes
        return verify(replace(plan, pricing=pricing, projected_curve_bytes=curve, allowed_bytes=max(curve)))


def _thinned(points: tuple[Point, ...]) -> list[Point]:
    """Points at about even distances in bytes, the first and the last among them."""
    lowest, highest = points[0].peak_bytes, points[-1].peak_bytes
    sizes = (lowest + (highest - lowest) * rung // _RUNGS for rung in range(_RUNGS + 1))
    places = {bisect_right(points, size, key=lambda point: point.peak_bytes) - 1 for size in sizes}
    return [points[place] for place in sorted(places)]


def _given_bytes(plan: Plan) -> int:
    """What comes from outside: parameters, inputs, incoming gradients."""
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
