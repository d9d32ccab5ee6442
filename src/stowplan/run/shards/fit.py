"""A step over a mesh within a budget: each worker's part of it is captured, priced and planned like any step.

What a worker says to others are ops of its step that run once, in the order that their token gives: every
worker may keep, recompute and place whatever else it likes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import nn

from stowplan.capture import capture
from stowplan.errors import BadUse
from stowplan.run.planning import plan_within, planner_for_captured
from stowplan.run.shards.processes import MeshLike
from stowplan.run.shards.step import ShardedStep
from stowplan.run.stand_in import seen_as, with_forward
from stowplan.run.straight import StraightStep
from stowplan.run.tiles.plan import PlannedStep
from stowplan.run.tiles.ways import Search
from stowplan.run.wrappers import refuse_shards

Model = TypeVar("Model", bound=nn.Module)


def fit_on_mesh(
    model: Model,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    *,
    mesh: MeshLike,
    dims: Mapping[str, Sequence[int | None]] | None,
    search: Search,
    allowed_bytes: int,
) -> Model:
    """`model`, planned for this process's part in its step over `mesh`, within a budget of its own."""
    sharded = ShardedStep(model, args, kwargs, mesh=mesh, dims=dims)
    kind = type(f"Fitted{type(model).__name__}", (_FittedOnMesh, type(model)), {})
    fitted: Model = seen_as(kind, model)
    planned = _planned(sharded, model, search, allowed_bytes)
    fitted.__dict__["_fitting"] = FittingOnMesh(sharded, {sharded: planned}, setting_of(model))
    return fitted


def shards_of(fitted: nn.Module) -> ShardedStep:
    """The shards of a module that was fitted with a mesh: `share` of the arguments, `plan`, `workers`."""
    fitting = fitted.__dict__.get("_fitting")
    if not isinstance(fitting, FittingOnMesh):
        raise BadUse(f"{type(fitted).__name__} has no shards: they are of what fit(..., mesh=...) returns")
    return fitting.sharded


def _planned(sharded: ShardedStep, model: nn.Module, search: Search, allowed_bytes: int) -> PlannedStep:
    args, kwargs = sharded.example
    captured = capture(_local_model(sharded, model), args, kwargs)
    with sharded.workers.rehearsing():
        planner = planner_for_captured(
            captured, allow=search.allow, progress=search.progress, moves=search.moves
        )
    return PlannedStep(plan_within(planner, allowed_bytes - sharded.remembered_bytes), captured)


class _FittedOnMesh(nn.Module):
    """What fitting adds to a class: called with shares, its part of the step is run."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        fitting: FittingOnMesh = self.__dict__["_fitting"]
        return fitting.run(self, args, kwargs)


@dataclass(slots=True)
class FittingOnMesh:
    """The one plan of a module fitted with a mesh, which holds in the setting it was made for."""

    sharded: ShardedStep
    planned: Mapping[object, PlannedStep]
    setting: Mapping[str, object]
    bound: StraightStep | None = None

    def __deepcopy__(self, _: dict[int, Any]) -> "FittingOnMesh":
        """For a copy of the model: the same plan, bound to it when it is called."""
        return replace(self, bound=None)

    def run(self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """This worker's part of the results, for its part of the arguments."""
        refuse_shards(model)
        setting = setting_of(model)
        if changed := [name for name, now in setting.items() if now != self.setting[name]]:
            raise BadUse(
                f"{' and '.join(changed)} changed since fit was called with a mesh: a share does not tell the"
                " whole that it is of, so nothing new is planned. Call fit again; for evaluation, call the"
                " model that it was given"
            )
        if self.bound is None:
            (planned,) = self.planned.values()
            self.bound = planned.bound_to(model)
        self.sharded.workers.begin(self.sharded.changed_in(model))
        return self.bound(*args, **kwargs)


def setting_of(model: nn.Module) -> dict[str, object]:
    """What a captured step takes for granted, by name."""
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    return {
        "the mode (train or eval)": tuple(module.training for module in model.modules()),
        "autocast": torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        "what is trained": tuple(parameter.requires_grad for parameter in model.parameters()),
    }


def _local_model(step: ShardedStep, model: nn.Module) -> nn.Module:
    """The model with another forward: this worker's actions."""

    @wraps(type(model).forward)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        return step.run(step.bound_to(self).tensors(args, kwargs))

    return with_forward(model, forward)
