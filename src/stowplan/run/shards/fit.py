"""A step over a mesh within a budget: each worker's part of it is captured, priced and planned like any step.

What a worker says to others are ops of its step that run once, in the order that their token gives: every
worker may keep, recompute and place whatever else it likes.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from stowplan.errors import BadUse, BudgetTooSmall
from stowplan.plan.pricing import Machine
from stowplan.plan.shards.mesh import Axis, Mesh
from stowplan.plan.shards.options import Option, Surroundings, meshes_for, options_of
from stowplan.plan.shards.projection import Network
from stowplan.plan.shards.spread import Chosen
from stowplan.plan.tiles.master import Prefer
from stowplan.run.machine import device_of, measure_machine
from stowplan.run.shards.agreement import agreed
from stowplan.run.shards.choosing import Attempt, Tried, fastest_that_fits
from stowplan.run.shards.marks import marked_subject
from stowplan.run.shards.processes import MeshLike
from stowplan.run.shards.step import ShardedStep, ends_of, seeds_of, step_to_shard
from stowplan.run.shards.workers import Workers
from stowplan.run.stand_in import seen_as
from stowplan.run.straight import StraightStep
from stowplan.run.tiles.plan import PlannedStep, plan_step
from stowplan.run.tiles.ways import Search
from stowplan.run.wrappers import refuse_shards

Model = TypeVar("Model", bound=nn.Module)
LAYOUTS = ("follow", "choose")
"""Stages are cut as the inputs are, or otherwise where that pays."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a step is to be planned for: a budget, of which a reserve is left, and a way to search.

    `layouts` says whether stages may be cut otherwise than the inputs: one of `LAYOUTS`.
    """

    budget_bytes: int
    reserve_bytes: int
    search: Search
    prefer: Prefer
    dims: Chosen | None = None
    layouts: str = "follow"

    def __post_init__(self) -> None:
        if self.layouts not in LAYOUTS:
            raise BadUse(f"no layouts {self.layouts!r}; there is {', '.join(LAYOUTS)}")


def fit_on_mesh(
    model: Model,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    *,
    mesh: MeshLike | int,
    wish: Wish,
) -> Model:
    """`model`, planned for this process's part in its step over `mesh`, within a budget of its own."""
    kind = type(f"Fitted{type(model).__name__}", (_FittedOnMesh, type(model)), {})
    fitted: Model = seen_as(kind, model)
    found, tried = _Fit(model, args, kwargs, wish).on(mesh)
    planned: dict[object, PlannedStep] = {found.sharded: found.planned}
    fitted.__dict__["_fitting"] = FittingOnMesh(found.sharded, planned, setting_of(model), tried)
    return fitted


class _Fit:
    """A model's step, captured once, to be planned on meshes."""

    def __init__(
        self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], wish: Wish
    ) -> None:
        self._model, self._args, self._kwargs, self._wish = model, args, kwargs, wish
        self._captured = step_to_shard(model, args, kwargs)
        self._device = device_of(self._captured.graph)

    def on(self, mesh: MeshLike | int) -> tuple[Attempt, tuple[Tried, ...]]:
        """The step on a mesh, or on the mesh of so many workers that is fastest."""
        if isinstance(mesh, int) and self._wish.dims is not None:
            raise BadUse("dims says what the axes of a mesh cut; of a number of workers, that is chosen")
        if not isinstance(mesh, int) and self._wish.layouts == "follow":
            return self._attempt(mesh), ()
        options = self._options(mesh)
        return fastest_that_fits(options, lambda option: self._attempt(_place(mesh, option), option.chosen))

    def _options(self, mesh: MeshLike | int) -> tuple[Option, ...]:
        """The same on all workers, for the machine that the first one is on."""
        graph = self._captured.graph
        meeting = Workers(Mesh((Axis("data", mesh),)) if isinstance(mesh, int) else mesh)
        meshes = meshes_for(graph, mesh) if isinstance(mesh, int) else (meeting.mesh,)
        machine = astuple(measure_machine(self._device))
        first = Machine(*meeting.everyones(machine, self._device)[0])
        seeds = partial(seeds_of, self._captured, dims=self._wish.dims)
        return options_of(graph, meshes, Surroundings(seeds, ends_of(self._captured), first, Network()))

    def _attempt(self, mesh: MeshLike, chosen: Chosen | None = None) -> Attempt:
        sharded = ShardedStep(
            self._model,
            self._args,
            self._kwargs,
            mesh=mesh,
            dims=self._wish.dims,
            chosen=chosen,
            captured=self._captured,
        )
        plan = partial(_planned, sharded, self._model, self._wish)
        planned = agreed(sharded.workers, plan, self._wish.budget_bytes, self._device)
        own = planned.plan.projected_seconds, planned.plan.plain_seconds
        slowest = map(max, zip(*sharded.workers.everyones(own, self._device), strict=True))
        return Attempt(sharded, planned, *slowest)


def _place(mesh: MeshLike | int, option: Option) -> MeshLike:
    return option.mesh if isinstance(mesh, int) else mesh


def shards_of(fitted: nn.Module) -> ShardedStep:
    """The shards of a module that was fitted with a mesh: `share` of the arguments, `plan`, `workers`."""
    fitting = fitted.__dict__.get("_fitting")
    if not isinstance(fitting, FittingOnMesh):
        raise BadUse(f"{type(fitted).__name__} has no shards: they are of what fit(..., mesh=...) returns")
    return fitting.sharded


def choices_of(fitted: nn.Module) -> tuple[Tried, ...]:
    """The ways to hand out the step that were looked at, and what became of each, if it was to be chosen."""
    shards_of(fitted)
    fitting: FittingOnMesh = fitted.__dict__["_fitting"]
    return fitting.tried


def _planned(sharded: ShardedStep, model: nn.Module, wish: Wish) -> PlannedStep:
    """This worker's part of the step, as it fits beside what a step has to remember."""
    beside, search = wish.reserve_bytes + sharded.remembered_bytes, wish.search
    subject = marked_subject(sharded, model)
    try:
        with sharded.workers.rehearsing():
            return plan_step(
                subject,
                wish.budget_bytes - beside,
                allow=search.allow,
                prefer=wish.prefer,
                progress=search.progress,
                moves=search.moves,
            )
    except BudgetTooSmall as refusal:
        raise refusal.beside(beside, "the reserve and buffers as they were before a step") from None


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
    tried: tuple[Tried, ...] = ()
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
