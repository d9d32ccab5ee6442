"""`fit`: a module that trains like the one it was made of, within a budget in bytes.

The returned object is a shallow copy of the model under a subclass of its class: it has the same parameters,
buffers, submodules and state_dict, and differs in `forward` alone. For every new kind of call (shapes,
dtypes, modes) the step is captured, priced and planned once; after that the plan's own code runs.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stowplan.capture import Captured, capture
from stowplan.ops.effects import Effect, effect_of
from stowplan.ops.table import site_of
from stowplan.plan.make import TECHNIQUES, Planner
from stowplan.plan.plan import Plan
from stowplan.plan.pricing import Pricing, price_by_profile
from stowplan.plan.verify import verify
from stowplan.run.probe import Progress, probe
from stowplan.run.straight import StraightStep
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
) -> Model:
    """`model`, planned for calls like `model(*args, **kwargs)`: its training step stays under `budget`.

    The budget counts all that is alive on the device during forward and backward: parameters, buffers,
    inputs, gradients, activations, temporaries. `reserve` is what it must leave free for what stowplan does
    not see, such as optimizer state. Raises BudgetTooSmall, with the smallest budget, before anything runs.
    """
    allowed = parse_bytes(budget) - parse_bytes(reserve)
    fitting = Fitting(type(model).forward, allowed, tuple(allow), progress)
    fitted = copy.copy(model)
    fitted.__class__ = type(f"Fitted{type(model).__name__}", (_Fitted, type(model)), {})
    fitted.__dict__["_fitting"] = fitting
    with torch.enable_grad():
        fitting.step_for(fitted, args, dict(kwargs or {}))
    return fitted


def plans_of(fitted: nn.Module) -> tuple[Plan, ...]:
    """The plans that a fitted module has made so far, the first call's first."""
    fitting: Fitting = fitted.__dict__["_fitting"]
    return tuple(planned.plan for planned in fitting.steps.values())


class _Fitted(nn.Module):
    """What a fitted module adds to its class: another way to run `forward`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        fitting: Fitting = self.__dict__["_fitting"]
        if not torch.is_grad_enabled():
            return fitting.plain_forward(self, *args, **kwargs)
        return fitting.step_for(self, args, kwargs).step(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan and the code that runs it."""

    plan: Plan
    step: StraightStep


@dataclass(slots=True)
class Fitting:
    """The plans of one fitted module, by kind of call."""

    plain_forward: Callable[..., Any]
    allowed_bytes: int
    allow: tuple[str, ...]
    progress: Progress | None = None
    steps: dict[object, PlannedStep] = field(default_factory=dict)

    def step_for(
        self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> PlannedStep:
        """The step for calls like this one, planned if there was none like it before."""
        key = _kind_of_call(model, args, kwargs)
        if key not in self.steps:
            self.steps[key] = self._plan(model, args, kwargs)
        return self.steps[key]

    def _plan(self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> PlannedStep:
        captured = capture(_plain(model, self.plain_forward), args, kwargs)
        plan = plan_captured(captured, self.allowed_bytes, allow=self.allow, progress=self.progress)
        return PlannedStep(plan, StraightStep(captured, model, steps=plan.steps))


def plan_captured(
    captured: Captured,
    allowed_bytes: int,
    *,
    allow: Iterable[str] = TECHNIQUES,
    progress: Progress | None = None,
) -> Plan:
    """A verified plan for a captured step, priced by trying its ops on this machine."""
    planner = planner_for_captured(captured, allow=allow, progress=progress)
    return verify(planner.plan(allowed_bytes - replay_bytes(captured)))


def planner_for_captured(
    captured: Captured, *, allow: Iterable[str] = TECHNIQUES, progress: Progress | None = None
) -> Planner:
    """The searched frontier of a captured step."""
    pricing = price_captured(captured, progress)
    plain = captured.eager.peak_bytes(pricing.workspace_bytes)
    return Planner.of(captured.graph, pricing, allow=allow, plain_peak_bytes=plain)


def price_captured(captured: Captured, progress: Progress | None = None) -> Pricing:
    """Seconds and workspace of every op, tried on this machine or remembered from before."""
    probed = probe(captured, progress=progress)
    return price_by_profile(captured.graph, probed.profile, probed.workspace_bytes)


def replay_bytes(captured: Captured) -> int:
    """Room for the generator states that let random ops be run again with the same draws."""
    graph = captured.graph
    random = sum(bool(effect_of(site_of(graph, op)) & Effect.RANDOM) for op in graph.ops)
    return random * torch.get_rng_state().nbytes


def _plain(model: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """The fitted model as it was before, to be captured."""
    plain = copy.copy(model)
    plain.__class__ = type(type(model).__name__, (type(model),), {"forward": forward})
    return plain


def _kind_of_call(model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    """Equal for calls that one captured step serves."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    devices = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
    casts = tuple((d, torch.get_autocast_dtype(d)) for d in sorted(devices) if torch.is_autocast_enabled(d))
    modes = tuple(module.training for module in model.modules())
    wanted = tuple(parameter.requires_grad for parameter in model.parameters())
    return tuple(map(_look_of, leaves)), str(spec), casts, modes, wanted


def _look_of(leaf: object) -> object:
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
    return leaf
