"""Member: a graph under a shared budget, with plans from its smallest to its fastest."""

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise

from stowplan.capture import Captured
from stowplan.ir import Graph, Kind, Phase
from stowplan.plan.decision import Compute, Free
from stowplan.plan.frontier import Point, floor_of
from stowplan.plan.make import Planner
from stowplan.plan.plan import Plan
from stowplan.plan.pricing import Pricing
from stowplan.plan.problem import problem_of
from stowplan.plan.simulate import simulate
from stowplan.plan.verify import verify
from stowplan.run.fit import price_captured, replayed_bytes

_RUNGS = 32  # a frontier is thinned to about as many plans


@dataclass(eq=False)
class Member:
    """One captured graph and its ladder of plans: on rung 0 the smallest, on the last the fastest.

    Between the two halves of a graph that is followed by others, those run: to this one they are like an op
    with a large workspace. They are taken to need as much as this graph does at its smallest, so that it is
    planned for keeping little meanwhile, besides having a small peak of its own.
    """

    captured: Captured
    allow: tuple[str, ...]
    moves: int | None
    is_followed: bool
    rung: int = 0  # the highest that is known to leave room for others
    is_known: bool = False  # whether a whole step with it has been seen
    _planners: dict[bool, Planner] = field(default_factory=dict)
    _plans: dict[tuple[bool, int], Plan] = field(default_factory=dict)

    def plan_at(self, rung: int, *, is_followed: bool | None = None) -> Plan:
        """Its plan on a rung, under what is known of others or what is said here."""
        key = self.is_followed if is_followed is None else is_followed, rung
        if key not in self._plans:
            point = self._ladder(key[0])[rung]
            self._plans[key] = self._priced_truly(self._planner(key[0]).plan(point.peak_bytes))
        return self._plans[key]

    def smallest_plan(self) -> Plan:
        """The plan with the smallest peak, whatever it keeps."""
        return self.plan_at(0, is_followed=False)

    def gains(self, *, is_followed: bool) -> list[float]:
        """Seconds saved per byte by each rung over the one below; those after a poor one count no more."""
        pairs = pairwise(self._ladder(is_followed))
        return list(accumulate((_gain(lower, upper) for lower, upper in pairs), min))

    def learn(self, rung: int, *, is_followed: bool) -> None:
        """A sequence of graphs that it belongs to leaves it this rung. Several leave it the lowest."""
        same = self.is_known and is_followed == self.is_followed
        if not self.is_known or (is_followed and not self.is_followed):
            self.rung, self.is_followed = rung, is_followed
        elif same:
            self.rung = min(self.rung, rung)
        self.is_known = True

    def _ladder(self, is_followed: bool) -> list[Point]:
        points = self._planner(is_followed).frontier.points
        lowest, highest = points[0].peak_bytes, points[-1].peak_bytes
        sizes = (lowest + (highest - lowest) * rung // _RUNGS for rung in range(_RUNGS + 1))
        places = {bisect_right(points, size, key=lambda point: point.peak_bytes) - 1 for size in sizes}
        return [points[place] for place in sorted(places)]

    def _priced_truly(self, plan: Plan) -> Plan:
        """Without what was assumed of others."""
        pricing = self._pricing
        curve = simulate(plan.graph, plan.steps, pricing.seconds, pricing.workspace_bytes).curve_bytes
        return verify(replace(plan, pricing=pricing, projected_curve_bytes=curve, allowed_bytes=max(curve)))

    def _planner(self, is_followed: bool) -> Planner:
        if is_followed not in self._planners:
            self._planners[is_followed] = Planner.of(
                self.captured.graph,
                _with_others_between(self.captured.graph, self._pricing) if is_followed else self._pricing,
                allow=self.allow,
                plain_peak_bytes=self.captured.eager.peak_bytes(self._pricing.workspace_bytes),
                moves=self.moves,
            )
        return self._planners[is_followed]

    @cached_property
    def _pricing(self) -> Pricing:
        return price_captured(self.captured)


def _gain(lower: Point, upper: Point) -> float:
    return (lower.extra_seconds - upper.extra_seconds) / (upper.peak_bytes - lower.peak_bytes)


def _with_others_between(graph: Graph, pricing: Pricing) -> Pricing:
    """As if the first op of backward needed, besides, what the whole step needs at least."""
    problem = problem_of(graph, [pricing.seconds[op.id] for op in graph.ops], pricing.workspace_bytes)
    first = graph.ops[problem.turn].id
    others = floor_of(problem) - problem.standing_bytes
    workspace = {**pricing.workspace_bytes, first: pricing.workspace_bytes.get(first, 0) + others}
    return replace(pricing, workspace_bytes=workspace)


def peak_bytes(plan: Plan) -> int:
    """The most that a plan has at once, with the states that it replays draws from."""
    return plan.projected_peak_bytes + replayed_bytes(plan)


def kept_bytes(plan: Plan) -> int:
    """What is there between the two halves of a plan, besides what comes from outside."""
    made = {name for op in plan.graph.ops for name in op.writes()}
    outside = (tensor for name, tensor in plan.graph.tensors.items() if name not in made)
    given = sum(t.nbytes or 0 for t in outside if t.alias_of is None and t.kind is not Kind.CONSTANT)
    return plan.projected_curve_bytes[_turn(plan)] - given + replayed_bytes(plan)


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
