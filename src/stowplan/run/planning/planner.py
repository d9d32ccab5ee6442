"""Planning a captured step: price its ops, search, and take the best of its candidates.

A subject is a captured step and the call it was captured of; a drafted step has the draft of its plan, and a
planned step its plan, and how to run it. Ops are probed on this machine. A plan that repeats random draws
keeps states of the generator, which are not tensors of the graph, so those draws get memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from torch import nn

from stowplan.capture import Captured, Handle
from stowplan.capture.recording import Loss
from stowplan.ir import Graph, Op
from stowplan.ir.graph import collector_paused
from stowplan.ops.effects import SECOND_FORWARD, UPDATE, Effect, effect_of
from stowplan.ops.table import site_of
from stowplan.plan.draft import Draft, Schedule
from stowplan.plan.frontier import Point
from stowplan.plan.judge.verify import verify
from stowplan.plan.options import DEFAULT_OPTIONS, PlanOptions
from stowplan.plan.plan import Plan
from stowplan.plan.planner import Planner
from stowplan.plan.prices import price_by_profile
from stowplan.plan.pricing import Pricing
from stowplan.plan.select import Baseline, Candidate, CandidateGroup, GraphCandidate, Refusals, Selector
from stowplan.plan.sockets import Socket
from stowplan.plan.steps import RecomputeOp, Step
from stowplan.run.border.frozen import NOWHERE, OutsidePlaces
from stowplan.run.cost.machine import device_of
from stowplan.run.cost.probe import PROBING_SECONDS, probe
from stowplan.run.planning.recapture import Replacement, forward_ops, recapture
from stowplan.run.step.function import Consumer, tier_for, waiting_of
from stowplan.run.step.placing import BY_ALLOCATOR, Placing
from stowplan.run.step.straight import ForwardBegins, StraightStep
from stowplan.torch_private import OpOverload

if TYPE_CHECKING:
    from stowplan.run.second_derivatives import Differentiable


@dataclass(frozen=True, slots=True)
class Subject:
    """A captured step and the call that it was captured of, with the loss after it.

    `replacements` are run for some of its calls.
    """

    captured: Captured
    model: nn.Module
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    replacements: Mapping[OpOverload, Replacement] = field(default_factory=dict)
    loss: Loss | None = None

    def as_run(self) -> Captured:
        """The step with the replacements."""
        if not self.replacements:
            return self.captured
        order = forward_ops(self.captured.graph)
        return recapture(self.captured, self.model, self.args, self.kwargs, order, self.replacements)


class StepPlacement(Protocol):
    """What a technique has decided of the places of results."""

    def placing(self, captured: Captured, plan: Plan) -> Placing:
        """What writes it into the code of the step."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan and its step, which techniques may have captured a second time, or have placed."""

    plan: Plan
    captured: Captured
    placement: StepPlacement | None = None

    def bound_to(
        self,
        model: nn.Module,
        *,
        loss: object = None,
        places: OutsidePlaces = NOWHERE,
        consumer: Consumer | None = None,
        beside: ForwardBegins | None = None,
        again: "Differentiable | None" = None,
    ) -> StraightStep:
        """The step, ready to be called like the model; `places` finds tensors outside of the modules.

        `consumer` takes the gradients that the plan consumes, and `beside` learns of each forward. `again`
        runs the step as it is, for second derivatives.
        """
        with collector_paused():
            return StraightStep(
                self.captured,
                model,
                loss=loss,
                steps=self.plan.steps,
                waiting=waiting_of(model),
                places=places,
                consumer=consumer,
                beside=beside,
                placing=self.placement.placing(self.captured, self.plan) if self.placement else BY_ALLOCATOR,
                again=again,
            )


@dataclass(frozen=True, slots=True)
class DraftedStep:
    """A draft and its step, on the way to a planned step: whoever has to change the draft replaces it here.

    `points` are the frontier of the step, if it was searched. The decisions of a draft that is `carried` come
    from a plan of the same program at another size. A first draft, which a longer search may improve, has
    `keep`: it takes what is kept for the next time.
    """

    draft: Draft
    captured: Captured
    points: tuple[Point, ...] = ()
    is_carried: bool = False
    placement: StepPlacement | None = None
    keep: Callable[[Draft], None] | None = None

    def verified(self) -> PlannedStep:
        """The end of the road: the planned step; IllegalPlan if the draft is not legal."""
        return PlannedStep(verify(self.draft), self.captured, self.placement)


def planner_for_captured(captured: Captured, options: PlanOptions = DEFAULT_OPTIONS) -> Planner:
    """The searched frontier of a captured step."""
    pricing = price_captured(captured, options)
    plain = captured.eager.peak_bytes(pricing.workspace_bytes)
    return Planner.of(captured.graph, pricing, options, plain_peak_bytes=plain)


def draft_within(planner: Planner, allowed_bytes: int) -> Draft:
    """The fastest draft that is within the budget together with its generator states.

    Points are examined from the fastest on, so that a larger budget never costs more time.
    """
    room = allowed_bytes
    while (point := planner.frontier.at(room)) is not None:
        steps = point.steps(planner.problem)
        if point.peak_bytes + _replayed_bytes(planner.problem.graph, steps) <= allowed_bytes:
            return planner.draft_at(point, allowed_bytes, steps)
        room = point.peak_bytes - 1
    smallest = planner.frontier.points[0].steps(planner.problem)
    beside = _replayed_bytes(planner.problem.graph, smallest)
    refusal = planner.refusal(allowed_bytes - beside)
    raise refusal.beside(beside, "states of the generator to repeat random draws")


def replayed_bytes(plan: Schedule) -> int:
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

    For a first plan, ops that the cache does not know run once. If offloading is allowed, the tier of the
    step's device is priced as well.
    """
    limit_seconds = 0.0 if options.is_first else PROBING_SECONDS
    probed = probe(captured, limit_seconds=limit_seconds, progress=options.search.progress)
    pricing = price_by_profile(captured.graph, probed.profile, probed.workspace_bytes)
    if _runs_twice(captured.graph):
        twice = _seconds_of_step(captured.graph, pricing, times=2)
        pricing = replace(pricing, seconds={**pricing.seconds, **twice})
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
    [Subject, Pricing | None, Baseline, PlanOptions, Refusals],
    Iterable[StepCandidate | CandidateGroup[StepCandidate]],
]
STEP_CANDIDATES: Socket[StepCandidates] = Socket("run", "tile")
"""What techniques make of a captured step. The pricing is that of its ops, if they were probed."""


COMPILED: "Socket[Callable[[Subject, Pricing, Baseline, PlanOptions], CapturedCandidate | None]]" = Socket(
    "run", "compiled"
)
"""The step with compiled kernels, where these are faster."""


class CapturedCandidate(GraphCandidate):
    """A step whose ops were probed. Its drafts leave room for the draws they replay."""

    def __init__(
        self,
        captured: Captured,
        pricing: Pricing,
        baseline: Baseline,
        options: PlanOptions,
        *,
        is_one_of_many: bool = False,
    ) -> None:
        super().__init__(captured.graph, pricing, baseline, options, is_one_of_many=is_one_of_many)
        self.captured = captured

    @property
    def points(self) -> tuple[Point, ...]:
        """The frontier, if a budget has asked for it."""
        return self.searched.points if self.searched else ()

    def draft(self, allowed_bytes: int) -> Draft:
        draft = self.told(self.answered(allowed_bytes, draft_within))
        added = _added_seconds(self.captured, self.pricing)
        return replace(draft, plain_seconds=draft.plain_seconds - added)


def with_kernels(subject: Subject, options: PlanOptions) -> Captured:
    """The step with compiled kernels, if the options ask for them and they are faster."""
    captured = subject.as_run()
    if not options.execution.is_compiled:
        return captured
    pricing = price_captured(captured, options)
    baseline = Baseline(sum(pricing.seconds.values()), captured.eager.peak_bytes(pricing.workspace_bytes))
    found = COMPILED.of("compiled")(subject, pricing, baseline, options)
    return found.captured if found else captured


def step_planner(subject: Subject, options: PlanOptions = DEFAULT_OPTIONS) -> Selector[StepCandidate]:
    """Probes the ops of a step; frontiers are searched when a budget first asks for them."""
    captured = subject.as_run()
    pricing = price_captured(captured, options)
    seconds = sum(pricing.seconds[op.id] for op in captured.graph.ops) - _added_seconds(captured, pricing)
    baseline = Baseline(seconds, captured.eager.peak_bytes(pricing.workspace_bytes))
    plain: StepCandidate = CapturedCandidate(captured, pricing, baseline, options)
    known = None if subject.replacements else pricing
    find = partial(_candidates, subject, known, baseline, options)
    compiled = None
    if options.execution.is_compiled:
        compiled = COMPILED.of("compiled")(subject, pricing, baseline, options)
    prefer, gap, slowest = options.prefer, options.search.gap, options.slowest
    return Selector(plain, baseline, find, prefer, compiled=compiled, gap=gap, slowest=slowest)


def takes_longer(captured: Captured) -> bool:
    """Whether a step takes longer than eager's even if nothing is recomputed."""
    return _runs_twice(captured.graph) or _transfer_seconds(captured) > 0


def _added_seconds(captured: Captured, pricing: Pricing) -> float:
    """What the plan takes and eager does not: transfers of optimizer state, a second forward and backward."""
    first = _seconds_of_step(captured.graph, pricing, times=0.5) if _runs_twice(captured.graph) else {}
    return _transfer_seconds(captured) + sum(first.values())


def _transfer_seconds(captured: Captured) -> float:
    handles = (a for call in captured.program.calls.values() for a in call.args if isinstance(a, Handle))
    return sum(handle.added_seconds for handle in handles)


def _runs_twice(graph: Graph) -> bool:
    """Whether forward and backward are run for the norm of the gradients, and then for the updates."""
    return SECOND_FORWARD in graph.tensors


def _seconds_of_step(graph: Graph, pricing: Pricing, *, times: float) -> dict[str, float]:
    """The seconds of each op of forward and backward, multiplied by `times`."""
    return {op.id: times * pricing.seconds[op.id] for op in graph.ops if op.type != UPDATE}


def _candidates(
    subject: Subject, pricing: Pricing | None, baseline: Baseline, options: PlanOptions, refusals: Refusals
) -> Iterator[StepCandidate | CandidateGroup[StepCandidate]]:
    for candidates in STEP_CANDIDATES.offered(options.allow):
        yield from candidates(subject, pricing, baseline, options, refusals)


def draft_step(subject: Subject, allowed_bytes: int, options: PlanOptions = DEFAULT_OPTIONS) -> DraftedStep:
    """The best draft within `allowed_bytes`; raises BudgetTooSmall with the smallest that was found."""
    draft, candidate = step_planner(subject, options).answer(allowed_bytes)
    points = candidate.points if isinstance(candidate, CapturedCandidate) else ()
    return DraftedStep(draft, candidate.captured, points)
