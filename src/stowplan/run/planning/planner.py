"""Planning a captured step: price its ops, search, and take the best of its candidates.

Ops are probed on this machine. A plan that repeats random draws keeps states of the generator, which are not
tensors of the graph, so those draws get memory.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeAlias

import torch

from stowplan.capture import Captured, Handle
from stowplan.ir import Graph, Op
from stowplan.ops.effects import Effect, effect_of
from stowplan.ops.table import site_of
from stowplan.plan.frontier import Point
from stowplan.plan.judge.verify import verify
from stowplan.plan.options import DEFAULT_OPTIONS, Kernels, PlanOptions, Prefer
from stowplan.plan.plan import Plan, RecomputeOp, Step
from stowplan.plan.planner import Planner
from stowplan.plan.pricing import Pricing, price_by_profile
from stowplan.plan.select import Baseline, Candidate, GraphCandidate, Refusals, Selector
from stowplan.plan.technique import Socket
from stowplan.run.cost.machine import device_of
from stowplan.run.cost.probe import probe
from stowplan.run.planning.subject import PlannedStep, Subject
from stowplan.run.step.halves import tier_for


def planner_for_captured(captured: Captured, options: PlanOptions = DEFAULT_OPTIONS) -> Planner:
    """The searched frontier of a captured step."""
    pricing = price_captured(captured, options)
    plain = captured.eager.peak_bytes(pricing.workspace_bytes)
    return Planner.of(captured.graph, pricing, options, plain_peak_bytes=plain)


def plan_within(planner: Planner, allowed_bytes: int) -> Plan:
    """The fastest verified plan that is within the budget together with its generator states.

    Plans are examined from the fastest on, so that a larger budget never costs more time.
    """
    room = allowed_bytes
    while (point := planner.frontier.at(room)) is not None:
        beside = _replayed_bytes(planner.problem.graph, point.steps(planner.problem))
        if point.peak_bytes + beside <= allowed_bytes:
            return verify(planner.plan_at(point, allowed_bytes))
        room = point.peak_bytes - 1
    smallest = planner.frontier.points[0].steps(planner.problem)
    beside = _replayed_bytes(planner.problem.graph, smallest)
    refusal = planner.refusal(allowed_bytes - beside)
    raise refusal.beside(beside, "states of the generator to repeat random draws")


def replayed_bytes(plan: Plan) -> int:
    """The bytes that a plan keeps beyond tensors: the generator's state before each recomputed random op.

    One more state exists while draws are repeated: the state to return to.
    """
    return _replayed_bytes(plan.graph, plan.steps)


def _replayed_bytes(graph: Graph, steps: Iterable[Step]) -> int:
    again = {step.op for step in steps if isinstance(step, RecomputeOp)}
    replayed = sum(op.id in again and is_random(graph, op) for op in graph.ops)
    return (replayed + bool(replayed)) * _rng_state_bytes(graph)


def price_captured(captured: Captured, options: PlanOptions = DEFAULT_OPTIONS) -> Pricing:
    """Seconds and workspace of every op, probed on this machine or read from the cache.

    If offloading is allowed, the tier of the step's device is priced as well.
    """
    probed = probe(captured, progress=options.progress)
    pricing = price_by_profile(captured.graph, probed.profile, probed.workspace_bytes)
    if not options.offloads:
        return pricing
    return replace(pricing, tier=tier_for(device_of(captured.graph)).described())


def replay_bytes(captured: Captured) -> int:
    """The bytes of the generator states that let every random op be recomputed with the same draws."""
    random = sum(is_random(captured.graph, op) for op in captured.graph.ops)
    return (random + bool(random)) * _rng_state_bytes(captured.graph)


def _rng_state_bytes(graph: Graph) -> int:
    """What a state takes of the budget: on an accelerator nothing, for states are in the host's memory."""
    return torch.get_rng_state().nbytes if device_of(graph).type == "cpu" else 0


def is_random(graph: Graph, op: Op) -> bool:
    """Whether the op draws random numbers."""
    return bool(effect_of(site_of(graph, op)) & Effect.RANDOM)


class StepCandidate(Candidate, Protocol):
    """A candidate that can be run."""

    @property
    def captured(self) -> Captured:
        """The step that its plans are for."""


StepCandidates: TypeAlias = Callable[
    [Subject, Pricing | None, Baseline, PlanOptions, Refusals], Iterable[StepCandidate]
]
STEP_CANDIDATES: Socket[StepCandidates] = Socket("run", "tile")
"""What techniques make of a captured step. The pricing is that of its ops, if they were probed."""


COMPILED: "Socket[Callable[[Captured, Pricing, Baseline, PlanOptions], CapturedCandidate | None]]" = Socket(
    "run", "compiled"
)
"""The step with compiled kernels, where these are faster."""


class CapturedCandidate(GraphCandidate):
    """A step whose ops were probed. Its plans are verified and leave room for the draws they replay."""

    def __init__(
        self, captured: Captured, pricing: Pricing, baseline: Baseline, options: PlanOptions
    ) -> None:
        super().__init__(captured.graph, pricing, baseline, options)
        self.captured = captured

    @property
    def points(self) -> tuple[Point, ...]:
        """The frontier, if a budget has asked for it."""
        return self.searched.points if self.searched else ()

    def plan(self, allowed_bytes: int) -> Plan:
        plan = self.told(self.answered(allowed_bytes, plan_within))
        return replace(plan, plain_seconds=plan.plain_seconds - _added_seconds(self.captured))


def with_kernels(captured: Captured, options: PlanOptions) -> Captured:
    """The step with compiled kernels, if the options ask for them and they are faster."""
    if options.kernels == Kernels.EAGER:
        return captured
    pricing = price_captured(captured, options)
    baseline = Baseline(sum(pricing.seconds.values()), captured.eager.peak_bytes(pricing.workspace_bytes))
    found = COMPILED.of("compiled")(captured, pricing, baseline, options)
    return found.captured if found else captured


def step_planner(subject: Subject, options: PlanOptions = DEFAULT_OPTIONS) -> Selector[StepCandidate]:
    """Probes the ops of a step; frontiers are searched when a budget first asks for them."""
    captured = subject.as_run()
    pricing = price_captured(captured, options)
    seconds = sum(pricing.seconds[op.id] for op in captured.graph.ops) - _added_seconds(captured)
    baseline = Baseline(seconds, captured.eager.peak_bytes(pricing.workspace_bytes))
    plain: StepCandidate = CapturedCandidate(captured, pricing, baseline, options)
    known = None if subject.replacements else pricing
    find = partial(_candidates, subject, known, baseline, options)
    compiled = None
    if options.kernels == Kernels.COMPILED:
        compiled = COMPILED.of("compiled")(captured, pricing, baseline, options)
    return Selector(plain, baseline, find, Prefer(options.prefer), compiled=compiled)


def _added_seconds(captured: Captured) -> float:
    """What ops of the plan wait for and eager does not: transfers of optimizer state."""
    handles = (a for call in captured.program.calls.values() for a in call.args if isinstance(a, Handle))
    return sum(handle.added_seconds for handle in handles)


def _candidates(
    subject: Subject, pricing: Pricing | None, baseline: Baseline, options: PlanOptions, refusals: Refusals
) -> Iterator[StepCandidate]:
    for candidates in STEP_CANDIDATES.offered(options.allow):
        yield from candidates(subject, pricing, baseline, options, refusals)


def plan_step(subject: Subject, allowed_bytes: int, options: PlanOptions = DEFAULT_OPTIONS) -> PlannedStep:
    """The best plan within `allowed_bytes`; raises BudgetTooSmall with the smallest that was found."""
    plan, candidate = step_planner(subject, options).answer(allowed_bytes)
    points = candidate.points if isinstance(candidate, CapturedCandidate) else ()
    return PlannedStep(plan, candidate.captured, points)
