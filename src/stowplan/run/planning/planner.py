"""Planning a captured step: price its ops, search, take the best of its candidates, and keep it on disk.

A subject is a captured step and the call it was captured of; a planned step is its plan and how to run it.
Ops are probed on this machine. A plan that repeats random draws keeps states of the generator, which are not
tensors of the graph, so those draws get memory.

PlanCache finds a plan again by all it depends on: the graph, the budget, the techniques, the machine, and the
code that plans. What is damaged, or from another version, is no error: the step is planned again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from torch import nn

from stowplan import __version__
from stowplan.capture import Captured, Handle
from stowplan.capture.recording import Loss
from stowplan.errors import IllegalPlan, PlanOfAnotherStep, StowplanError
from stowplan.ir import Graph, Op
from stowplan.ir.graph import collector_paused
from stowplan.ir.text import format_graph
from stowplan.ops.effects import SECOND_FORWARD, UPDATE, Effect, effect_of
from stowplan.ops.table import registered_types, site_of
from stowplan.plan.files import plan_file
from stowplan.plan.files.sameness import first_difference, other_ops
from stowplan.plan.frontier import Point
from stowplan.plan.judge.verify import verify
from stowplan.plan.options import DEFAULT_OPTIONS, Kernels, PlanOptions, Prefer, Socket
from stowplan.plan.plan import Plan, Pricing, RecomputeOp, Step
from stowplan.plan.planner import Planner, refuse_hopeless
from stowplan.plan.prices import price_by_profile
from stowplan.plan.problem import slices_last
from stowplan.plan.select import Baseline, Candidate, GraphCandidate, Group, Refusals, Selector
from stowplan.run.border.frozen import NOWHERE, Places
from stowplan.run.cost.machine import device_of, platform_of, replace_file, user_folder
from stowplan.run.cost.probe import probe
from stowplan.run.planning.recapture import Replacement, forward_ops, recapture
from stowplan.run.step.function import Consumer, tier_for, waiting_of
from stowplan.run.step.straight import ForwardBegins, StraightStep
from stowplan.torch_private import OpOverload
from stowplan.units import format_bytes
from stowplan.watch import limited_to

if TYPE_CHECKING:
    from stowplan.plan.allocator.arena import ArenaLayout
    from stowplan.plan.allocator.held_blocks import HeldBlocks
    from stowplan.run.second_derivatives import Differentiable
    from stowplan.run.step.holding import HoldingCode


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


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan and its step, which techniques may have captured a second time.

    `points` are the frontier of the step, if it was searched. The decisions of a plan that is `carried` come
    from a plan of the same program at another size. With an `arena`, the step's tensors lie there;
    `held_blocks` are held while it runs.
    """

    plan: Plan
    captured: Captured
    points: tuple[Point, ...] = ()
    is_carried: bool = False
    arena: "ArenaLayout | None" = None
    held_blocks: "HeldBlocks | None" = None

    def bound_to(
        self,
        model: nn.Module,
        *,
        loss: object = None,
        places: Places = NOWHERE,
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
                arena=self.arena,
                holding=self._holding(),
                again=again,
            )

    def _holding(self) -> "HoldingCode | None":
        if self.held_blocks is None:
            return None
        from stowplan.run.step.holding import HoldingCode  # most steps hold no blocks

        return HoldingCode(self.held_blocks, self.plan, device_of(self.captured.graph))


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
        steps = point.steps(planner.problem)
        if point.peak_bytes + _replayed_bytes(planner.problem.graph, steps) <= allowed_bytes:
            return verify(planner.plan_at(point, allowed_bytes, steps))
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
    Iterable[StepCandidate | Group[StepCandidate]],
]
STEP_CANDIDATES: Socket[StepCandidates] = Socket("run", "tile")
"""What techniques make of a captured step. The pricing is that of its ops, if they were probed."""


COMPILED: "Socket[Callable[[Subject, Pricing, Baseline, PlanOptions], CapturedCandidate | None]]" = Socket(
    "run", "compiled"
)
"""The step with compiled kernels, where these are faster."""


class CapturedCandidate(GraphCandidate):
    """A step whose ops were probed. Its plans are verified and leave room for the draws they replay."""

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

    def plan(self, allowed_bytes: int) -> Plan:
        plan = self.told(self.answered(allowed_bytes, plan_within))
        added = _added_seconds(self.captured, self.pricing)
        return replace(plan, plain_seconds=plan.plain_seconds - added)


def with_kernels(subject: Subject, options: PlanOptions) -> Captured:
    """The step with compiled kernels, if the options ask for them and they are faster."""
    captured = subject.as_run()
    if options.kernels == Kernels.EAGER:
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
    if options.kernels == Kernels.COMPILED:
        compiled = COMPILED.of("compiled")(subject, pricing, baseline, options)
    prefer, gap, slowest = Prefer(options.prefer), options.gap, options.slowest
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
) -> Iterator[StepCandidate | Group[StepCandidate]]:
    for candidates in STEP_CANDIDATES.offered(options.allow):
        yield from candidates(subject, pricing, baseline, options, refusals)


def plan_step(subject: Subject, allowed_bytes: int, options: PlanOptions = DEFAULT_OPTIONS) -> PlannedStep:
    """The best plan within `allowed_bytes`; raises BudgetTooSmall with the smallest that was found."""
    plan, candidate = step_planner(subject, options).answer(allowed_bytes)
    points = candidate.points if isinstance(candidate, CapturedCandidate) else ()
    return PlannedStep(plan, candidate.captured, points)


RESUMED: Socket[Callable[[Plan, Subject], Captured]] = Socket("run", "tile", "compiled")
"""How a step is captured that a plan from elsewhere is for, where a technique changed its graph."""

ADOPTED: Socket[Callable[[Plan, Subject], Captured]] = Socket("run", "tile")
"""The same for the plan of another worker, whose step has the same ops on tensors of the same sizes."""

_MOST_PLANS = 200
_PLANNING = ("analyse", "ir", "ops", "plan", "run")


@dataclass(frozen=True, slots=True)
class PlanCache:
    """A folder of plans: the user's cache folder, unless another is given."""

    folder: Path | None = None

    def step_for(
        self,
        subject: Subject,
        allowed_bytes: int,
        options: PlanOptions,
    ) -> PlannedStep:
        """The step with the plan that is kept for it, or with one searched for now, which is then kept.

        Plans that offload are not kept, because the free space of a tier changes from day to day, nor are
        plans whose search was ended early.
        """
        graph = subject.captured.graph
        key = _key_of(graph, allowed_bytes, options)
        known = self.read(key, subject, allowed_bytes)
        if known is not None:
            return known
        refuse_hopeless(graph, allowed_bytes, options, lambda: step_planner(subject, options).smallest)
        with limited_to(options.seconds):
            found = _kept_whole(subject, allowed_bytes, options) or plan_step(subject, allowed_bytes, options)
        if found.plan.pricing.tier is None and not found.plan.cut_short:
            self.add(key, found.plan)
        return found

    def read(self, key: str, subject: Subject, allowed_bytes: int) -> PlannedStep | None:
        """The step with the plan under this key, held to all that a plan from elsewhere is held to."""
        try:
            plan = plan_file.read(self._path(key).read_text(encoding="utf-8"))
            return saved_step(plan, subject, allowed_bytes)
        except (OSError, UnicodeDecodeError, StowplanError):
            return None

    def add(self, key: str, plan: Plan) -> None:
        """Keep a plan; the oldest make room. Where nothing can be written, nothing is."""
        try:
            replace_file(self._path(key), plan_file.write(plan).encode())
            kept = sorted(self._folder.glob("*.plan.json"), key=lambda path: path.stat().st_mtime)
            for path in kept[:-_MOST_PLANS]:
                path.unlink(missing_ok=True)
        except OSError:
            return

    @property
    def _folder(self) -> Path:
        return self.folder or user_folder("plans")

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.plan.json"


USER_PLANS = PlanCache()


def _kept_whole(subject: Subject, allowed_bytes: int, options: PlanOptions) -> PlannedStep | None:
    if subject.captured.eager.peak_bytes() > allowed_bytes:
        return None
    from stowplan.run.planning.unprobed import plan_unprobed  # most fits have a smaller budget

    return plan_unprobed(subject, allowed_bytes, options)


def saved_step(plan: Plan, subject: Subject, allowed_bytes: int) -> PlannedStep:
    """A step with a plan from elsewhere; raises IllegalPlan if that is for another step or budget."""
    captured, plan = subject.captured, replace(plan, arena=None)  # laid out anew where one is asked for
    if plan.tile_maps:
        captured = RESUMED.of("tile")(plan, subject)
    elif plan.kernels or plan.relaid:
        captured = RESUMED.of("compiled")(plan, subject)
    difference = first_difference(plan.graph, slices_last(captured.graph))
    if difference is not None and plan.projected_for:
        kinds = other_ops(plan.graph, captured.graph) or "none in number"
        raise PlanOfAnotherStep(
            f"the plan was projected for {plan.projected_for}, and the step captured here differs:"
            f" {difference}; ops that differ: {kinds}; make a plan here with `plan`"
        )
    if difference is not None:
        raise PlanOfAnotherStep(
            f"the plan is for another step: {difference}; make one for this step with `plan`"
        )
    taken_bytes = plan.projected_peak_bytes + replayed_bytes(plan)
    if taken_bytes > allowed_bytes:
        raise IllegalPlan(
            f"the plan takes {format_bytes(taken_bytes)}, and {format_bytes(allowed_bytes)} are allowed"
        )
    return PlannedStep(verify(plan), captured)


def _key_of(graph: Graph, allowed_bytes: int, options: PlanOptions) -> str:
    """A file name from everything that a plan depends on."""
    device = device_of(graph)
    choices = sorted(options.allow), options.prefer, options.kernels
    limits = options.moves, options.gap, options.slowest
    rules = sorted(registered_types & {op.type for op in graph.ops})
    parts = (
        format_graph(graph),
        platform_of(device),
        allowed_bytes,
        *choices,
        *limits,
        rules,
        __version__,
        _code_digest(),
    )
    return sha256("\0".join(map(repr, parts)).encode()).hexdigest()[:32]


@cache
def _code_digest() -> str:
    """The code that plans: who changes it gets new plans."""
    source = Path(__file__).parents[2]
    files = (path for part in _PLANNING for path in sorted((source / part).rglob("*.py")))
    return sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()
