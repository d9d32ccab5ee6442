"""A step over a mesh within a budget: each worker's part of it is captured, priced and planned like any step.

What a worker says to others are ops of its step that run once, in the order that their token gives: every
worker may keep, recompute and place whatever else it likes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
from torch import nn

from stowplan.capture import capture
from stowplan.capture.composite import has_attachments, is_wrapper
from stowplan.errors import BadUse
from stowplan.plan.plan import Plan
from stowplan.request import Request
from stowplan.run.border.guard import Dependencies, Guard, Observation
from stowplan.run.planning.iterations import iterations
from stowplan.run.planning.planner import PlannedStep
from stowplan.run.step.straight import StraightStep
from stowplan.run.wrappers import fitted_class, refuse_shards, seen_as, with_forward
from stowplan.techniques.shards.run.choosing import Tried
from stowplan.techniques.shards.run.parameters import ParameterShards
from stowplan.techniques.shards.run.processes import MeshLike
from stowplan.techniques.shards.run.shard_planner import ShardPlanner
from stowplan.techniques.shards.run.step import ShardedStep

if TYPE_CHECKING:
    from stowplan.techniques.iteration.run.iteration import RunningIteration

Model = TypeVar("Model", bound=nn.Module)


def fit_on_mesh(
    model: Model,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    request: Request,
) -> Model:
    """`model`, planned for this process's part in its step over a mesh, within a budget of its own."""
    _refuse_opened(model)
    fitted: Model = seen_as(fitted_class(type(model), _FittedOnMesh), model)
    dependencies = _dependencies(model, args, kwargs)
    iteration = _running(request)
    planner = ShardPlanner(model, args, kwargs, request, iteration)
    found, tried = planner.on(cast("MeshLike | int", request.mesh.axes if request.mesh else None))
    fitted.__dict__["_fitting"] = FittingOnMesh(
        found.sharded, found.planned, dependencies, _autocast(model), tried, iteration
    )
    if iteration is not None:
        iteration.belongs_to(fitted)
        if found.sharded.parameters is not None:
            iteration.norm_over_workers = found.sharded.workers.norm
        elif iteration.accumulate > 1:
            iteration.sum_over_workers = found.sharded.sum_earlier
    if found.sharded.parameters is not None:
        # Nothing but the shapes of parameters has changed since the step was captured.
        facts = dependencies.picture(fitted, ()).facts
        fitted.__dict__["_fitting"].dependencies = replace(dependencies, facts=facts)
        model.register_forward_pre_hook(partial(_refuse_shards, found.sharded.parameters))
    return fitted


def _refuse_opened(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_wrapper(type(tensor)) or has_attachments(type(tensor)):
            raise BadUse(
                f"{name} is a {type(tensor).__name__}, and workers of a mesh divide plain tensors alone: call"
                " fit without mesh= in each worker, and wrap what it returns in DistributedDataParallel"
            )


def _running(request: Request) -> "RunningIteration | None":
    if request.iteration is None:
        return None
    offloads = "offload" in request.options.allow
    return iterations().running(request.iteration, offloads=offloads, on_workers=True)


def _refuse_shards(shards: ParameterShards, module: nn.Module, _: object) -> None:
    """Shards may broadcast like whole parameters, and give a wrong result without an error."""
    if shards.is_divided and not isinstance(module, _FittedOnMesh):
        raise BadUse(
            f"the parameters of {type(module).__name__} are shards since fit: call it within"
            " `with shards_of(fitted).whole():`, on all workers"
        )


def shards_of(fitted: nn.Module) -> ShardedStep:
    """The shards of a module that was fitted on a mesh: `share(*args)`, `plan` and `workers`."""
    fitting = fitted.__dict__.get("_fitting")
    if not isinstance(fitting, FittingOnMesh):
        raise BadUse(f"{type(fitted).__name__} has no shards: they are of what fit(..., mesh=...) returns")
    return fitting.sharded


def choices_of(fitted: nn.Module) -> tuple[Tried, ...]:
    """The divisions of the step that stowplan considered, if it was to choose one, each with its result."""
    shards_of(fitted)
    fitting: FittingOnMesh = fitted.__dict__["_fitting"]
    return fitting.tried


class _FittedOnMesh(nn.Module):
    """What fitting adds to a class: called with shares, its part of the step is run."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        fitting: FittingOnMesh = self.__dict__["_fitting"]
        return fitting.run(self, args, kwargs)


@dataclass(slots=True)
class FittingOnMesh:
    """The one plan of a module fitted with a mesh, which holds in the setting it was made for."""

    sharded: ShardedStep
    planned: PlannedStep
    dependencies: Dependencies
    autocast: object
    tried: tuple[Tried, ...] = ()
    iteration: "RunningIteration | None" = None
    bound: tuple[Guard, StraightStep] | None = None

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The one plan."""
        return (self.planned.plan,)

    def __deepcopy__(self, _: dict[int, Any]) -> "FittingOnMesh":
        """For a copy of the model: the same plan, bound to it when it is called."""
        if self.sharded.parameters is not None:
            raise BadUse("a module with sharded parameters cannot be copied: copy it before fit")
        if self.iteration is not None:
            raise BadUse(
                "a module that was fitted with optimizer= on a mesh cannot be copied: copy it before"
            )
        return replace(self, bound=None)

    def run(self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """This worker's part of the results, for its part of the arguments."""
        refuse_shards(model)
        if self.sharded.parameters is not None and not self.sharded.parameters.is_divided:
            raise BadUse("the step runs on shards: leave `shards_of(fitted).whole()` before it is called")
        if self.iteration is not None:
            self.iteration.forward_begins()
        if _autocast(model) != self.autocast:
            self._refuse("autocast was switched")
        if self.bound is None or not self.bound[0].is_untouched(()):
            self.bound = self._bound_to(model)
        self.sharded.workers.begin(self.sharded.changed_in(model))
        return self.bound[1](*args, **kwargs)

    def _bound_to(self, model: nn.Module) -> tuple[Guard, StraightStep]:
        guard = Guard(self.dependencies, model)
        if (change := guard.change(())) is not None:
            self._refuse(change)
        return guard, self.planned.bound_to(model, places=guard.places(), consumer=self.iteration)

    def _refuse(self, change: str) -> NoReturn:
        raise BadUse(
            f"{change} since fit was called with a mesh: a share does not tell the whole that it is of, so"
            " nothing new is planned. Call fit again; for evaluation, call the model that it was given"
        )


def _dependencies(model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Dependencies:
    """The dependencies of the whole step, whatever part this worker runs."""
    plain = with_forward(model, type(model).forward)
    observation = Observation(plain)
    with observation.watching():
        captured = capture(plain, args, kwargs)
    return observation.dependencies(captured.program, ())


def _autocast(model: nn.Module) -> object:
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
