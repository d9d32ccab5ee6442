"""The shard planner: plans each worker's part of a step within its budget, on a given or a chosen mesh."""

from collections.abc import Mapping
from dataclasses import astuple
from functools import partial

from torch import nn

from stowplan.errors import BadUse, BudgetTooSmall
from stowplan.plan.pricing import Machine
from stowplan.plan.shards.mesh import Axis, Mesh
from stowplan.plan.shards.options import Environment, Option, meshes_for, options_of
from stowplan.plan.shards.projection import Network
from stowplan.plan.shards.propagation import Chosen
from stowplan.run.cost.machine import device_of, measure_machine
from stowplan.run.fit import ShardRequest
from stowplan.run.planning.planner import plan_step
from stowplan.run.planning.subject import PlannedStep
from stowplan.run.shards.agreement import agreed
from stowplan.run.shards.choosing import Attempt, Tried, fastest_that_fits
from stowplan.run.shards.placeholders import subject_with_placeholders
from stowplan.run.shards.processes import MeshLike
from stowplan.run.shards.step import ShardedStep, ends_of, seeds_of, step_to_shard
from stowplan.run.shards.workers import Workers

LAYOUTS = ("follow", "choose")
"""Stages are cut along the dims of the inputs, or along other dims where that is faster."""


class ShardPlanner:
    """Captures a model's step once and plans it on meshes."""

    def __init__(
        self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], request: ShardRequest
    ) -> None:
        self._model, self._args, self._kwargs, self._request = model, args, kwargs, request
        if request.layouts not in LAYOUTS:
            raise BadUse(f"no layouts {request.layouts!r}; there is {', '.join(LAYOUTS)}")
        self._captured = step_to_shard(model, args, kwargs)
        self._device = device_of(self._captured.graph)

    def on(self, mesh: MeshLike | int) -> tuple[Attempt, tuple[Tried, ...]]:
        """The step on a mesh, or on the fastest mesh of a number of workers."""
        if isinstance(mesh, int) and self._request.dims is not None:
            raise BadUse("dims says what the axes of a mesh cut; of a number of workers, that is chosen")
        if not isinstance(mesh, int) and self._request.layouts == "follow":
            return self._attempt(mesh), ()
        options = self._options(mesh)
        return fastest_that_fits(options, lambda option: self._attempt(_place(mesh, option), option.chosen))

    def _options(self, mesh: MeshLike | int) -> tuple[Option, ...]:
        """The same on all workers, for the machine that the first one is on."""
        graph = self._captured.graph
        meeting = Workers(Mesh((Axis("data", mesh),)) if isinstance(mesh, int) else mesh)
        meshes = meshes_for(graph, mesh) if isinstance(mesh, int) else (meeting.mesh,)
        machine = astuple(measure_machine(self._device))
        first = Machine(*meeting.all_gather(machine, self._device)[0])
        seeds = partial(seeds_of, self._captured, dims=self._request.dims)
        return options_of(graph, meshes, Environment(seeds, ends_of(self._captured), first, Network()))

    def _attempt(self, mesh: MeshLike, chosen: Chosen | None = None) -> Attempt:
        workers = Workers(mesh)
        plan = partial(self._planned, workers, chosen)
        sharded, planned = agreed(workers, plan, self._request.budget_bytes, self._device)
        own = planned.plan.projected_seconds, planned.plan.plain_seconds
        slowest = map(max, zip(*workers.all_gather(own, self._device), strict=True))
        return Attempt(sharded, planned, *slowest)

    def _planned(self, workers: Workers, chosen: Chosen | None) -> tuple[ShardedStep, PlannedStep]:
        """This worker's part of the step, as it fits beside what a step has to remember."""
        request = self._request
        given = self._model, self._args, self._kwargs
        sharded = ShardedStep(*given, mesh=workers, dims=request.dims, chosen=chosen, captured=self._captured)
        beside = request.reserve_bytes + sharded.remembered_bytes
        subject = subject_with_placeholders(sharded, self._model)
        try:
            with workers.rehearsing():
                planned = plan_step(subject, request.budget_bytes - beside, request.options)
        except BudgetTooSmall as refusal:
            raise refusal.beside(beside, "the reserve and buffers as they were before a step") from None
        return sharded, planned


def _place(mesh: MeshLike | int, option: Option) -> MeshLike:
    return option.mesh if isinstance(mesh, int) else mesh
