"""`fit`: a module that trains like the one it was made of, within a budget in bytes.

The returned object is a shallow copy of the model under a subclass of its class: it has the same parameters,
buffers, submodules and state_dict, and differs in `forward` alone. For every new kind of call (shapes,
dtypes, modes) the step is captured, priced and planned once; after that the plan's own code runs.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stowplan.capture import Captured, capture
from stowplan.ir import Graph, Op
from stowplan.ops.effects import Effect, effect_of
from stowplan.ops.table import site_of
from stowplan.plan.decision import Again
from stowplan.plan.make import TECHNIQUES, Planner
from stowplan.plan.plan import Plan
from stowplan.plan.pricing import Pricing, price_by_profile
from stowplan.plan.verify import verify
from stowplan.run.probe import Progress, probe
from stowplan.run.straight import StraightStep
from stowplan.run.wrappers import refuse_shards, refuse_wrapped
from stowplan.units import parse_bytes

Model = TypeVar("Model", bound=nn.Module)


def fit(
    model: Model,
    args: tuple[object, ...],
    kwargs: Mapping[str, object] | None = None,
    *,
    budget: int | str,
    reserve: int | str = 0,
    allow: Iterable[str] = TECHNIQUES,
    progress: Progress | None = None,
    moves: int | None = None,
) -> Model:
    """`model`, planned for calls like `model(*args, **kwargs)`: its training step stays under `budget`.

    The budget counts all that is alive on the device during forward and backward: parameters, buffers,
    inputs, gradients, activations, temporaries. `reserve` is what it must leave free for what stowplan does
    not see: optimizer state, gradients that were there before, the buckets and shards of wrappers, which go
    around what is returned: `DistributedDataParallel(fit(...))`, `fully_shard(fit(...))`. `moves` bounds the
    search for a plan. Raises BudgetTooSmall, with the smallest budget, before anything runs.
    """
    refuse_wrapped(model)
    allowed = parse_bytes(budget) - parse_bytes(reserve)
    fitting = Fitting(type(model).forward, allowed, tuple(allow), progress, moves)
    fitted: Model = _seen_as(type(f"Fitted{type(model).__name__}", (_Fitted, type(model)), {}), model)
    fitted.__dict__["_fitting"] = fitting
    with torch.enable_grad():
        fitting.step_for(fitted, args, dict(kwargs or {}))
    return fitted


def plans_of(fitted: nn.Module) -> tuple[Plan, ...]:
    """The plans that a fitted module has made so far, the first call's first."""
    fitting: Fitting = fitted.__dict__["_fitting"]
    return tuple(planned.plan for planned in fitting.planned.values())


class _Fitted(nn.Module):
    """What a fitted module adds to its class: another way to run `forward`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        fitting: Fitting = self.__dict__["_fitting"]
        if not torch.is_grad_enabled():
            return fitting.plain_forward(self, *args, **kwargs)
        return fitting.step_for(self, args, kwargs)(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A captured step and the plan for it: what it takes to run it on a model."""

    captured: Captured
    plan: Plan


@dataclass(slots=True)
class Fitting:
    """The plans of one fitted module, by kind of call."""

    plain_forward: Callable[..., Any]
    allowed_bytes: int
    allow: tuple[str, ...]
    progress: Progress | None = None
    moves: int | None = None
    planned: dict[object, PlannedStep] = field(default_factory=dict)
    steps: dict[object, StraightStep] = field(default_factory=dict)  # bound to the model

    def __deepcopy__(self, _: dict[int, Any]) -> "Fitting":
        """For a copy of the model: the same plans, bound to it when it is called."""
        return replace(self, steps={})

    def step_for(
        self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> StraightStep:
        """The step for calls like this one, planned if there was none like it before."""
        key = kind_of_call(model, args, kwargs)
        if key not in self.planned:
            self.planned[key] = self._plan(model, args, kwargs)
        if key not in self.steps:
            planned = self.planned[key]
            self.steps[key] = StraightStep(planned.captured, model, steps=planned.plan.steps)
        return self.steps[key]

    def _plan(self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> PlannedStep:
        refuse_shards(model)
        captured = capture(_plain(model, self.plain_forward), args, kwargs)
        plan = plan_captured(
            captured, self.allowed_bytes, allow=self.allow, progress=self.progress, moves=self.moves
        )
        return PlannedStep(captured, plan)


def plan_captured(
    captured: Captured,
    allowed_bytes: int,
    *,
    allow: Iterable[str] = TECHNIQUES,
    progress: Progress | None = None,
    moves: int | None = None,
) -> Plan:
    """A verified plan for a captured step, priced by trying its ops on this machine."""
    planner = planner_for_captured(captured, allow=allow, progress=progress, moves=moves)
    return plan_within(planner, allowed_bytes)


def planner_for_captured(
    captured: Captured,
    *,
    allow: Iterable[str] = TECHNIQUES,
    progress: Progress | None = None,
    moves: int | None = None,
) -> Planner:
    """The searched frontier of a captured step."""
    pricing = price_captured(captured, progress)
    plain = captured.eager.peak_bytes(pricing.workspace_bytes)
    return Planner.of(captured.graph, pricing, allow=allow, plain_peak_bytes=plain, moves=moves)


def plan_within(planner: Planner, allowed_bytes: int) -> Plan:
    """The fastest verified plan that, with the generator states it replays draws from, is within the budget.

    Plans are tried from the fastest on, so that a larger budget never costs more time.
    """
    plan = planner.plan(allowed_bytes)
    while plan.projected_peak_bytes + replayed_bytes(plan) > allowed_bytes:
        plan = planner.plan(plan.projected_peak_bytes - 1)
    return verify(plan)


def replayed_bytes(plan: Plan) -> int:
    """What a plan keeps besides its tensors: the generator's state before each random op that runs again.

    One more is there while draws are replayed: the state to return to.
    """
    again = {step.op for step in plan.steps if isinstance(step, Again)}
    replayed = sum(op.id in again and is_random(plan.graph, op) for op in plan.graph.ops)
    return (replayed + bool(replayed)) * torch.get_rng_state().nbytes


def price_captured(captured: Captured, progress: Progress | None = None) -> Pricing:
    """Seconds and workspace of every op, tried on this machine or remembered from before."""
    probed = probe(captured, progress=progress)
    return price_by_profile(captured.graph, probed.profile, probed.workspace_bytes)


def replay_bytes(captured: Captured) -> int:
    """Room for the generator states that let random ops be run again with the same draws."""
    random = sum(is_random(captured.graph, op) for op in captured.graph.ops)
    return (random + bool(random)) * torch.get_rng_state().nbytes


def is_random(graph: Graph, op: Op) -> bool:
    """Whether the op draws random numbers."""
    return bool(effect_of(site_of(graph, op)) & Effect.RANDOM)


def _plain(model: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """The fitted model as it was before, to be captured. Its own hooks are run around the step, not in it."""
    plain: nn.Module = _seen_as(type(type(model).__name__, (type(model),), {"forward": forward}), model)
    for name, value in vars(plain).items():
        if name.endswith("_hooks") and "forward" in name:
            vars(plain)[name] = type(value)()
    return plain


def _seen_as(kind: type, model: nn.Module) -> Any:
    """The model's own parts as an instance of another class. Nothing of the class is run, as a copy would."""
    seen: object = object.__new__(kind)
    vars(seen).update(vars(model))
    return seen


def kind_of_call(model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    """Equal for calls that one captured step serves."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    devices = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
    casts = tuple((d, torch.get_autocast_dtype(d)) for d in sorted(devices) if torch.is_autocast_enabled(d))
    modes = tuple(module.training for module in model.modules())
    held = tuple(map(_look_of, (*model.parameters(), *model.buffers())))
    return tuple(map(_look_of, leaves)), str(spec), casts, modes, held


def _look_of(leaf: object) -> object:
    if isinstance(leaf, Tensor):
        return type(leaf), tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return leaf
