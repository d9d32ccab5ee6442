"""The shard planner: plans each worker's part of a step within its budget, on a given or a chosen mesh.

Agreement: what every worker has planned for itself holds for all of them, or for none.

A worker whose part does not fit must not leave the others waiting for its first message.

Placeholders: a worker's step captured without buckets, and the buckets that replace its placeholders.

A bucket returns its parameters as views, which no op of a captured step can do. A step that is to be tiled is
therefore captured with placeholder ops; when it is captured a second time, each is replaced by its bucket.
"""

from collections.abc import Callable, Mapping
from dataclasses import astuple, replace
from functools import partial, wraps
from hashlib import sha256
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from stowplan.capture import Call, Captured, Ref, capture
from stowplan.errors import BadUse, BudgetTooSmall
from stowplan.plan.judge.simulate import simulate
from stowplan.plan.options import PlanOptions
from stowplan.plan.plan import Machine, Plan
from stowplan.plan.shards.early_gathers import with_early_gathers
from stowplan.plan.shards.mesh import Axis, Mesh
from stowplan.plan.shards.options import Environment, Option, meshes_for, options_of
from stowplan.plan.shards.projection import Network
from stowplan.plan.shards.propagation import Chosen
from stowplan.run.cost.machine import device_of, measure_machine
from stowplan.run.fit import ShardRequest
from stowplan.run.planning.planner import ADOPTED, PlannedStep, Subject, plan_step, replayed_bytes
from stowplan.run.planning.recapture import Replacement
from stowplan.run.shards.actions import entered
from stowplan.run.shards.choosing import Attempt, Tried, fastest_that_fits
from stowplan.run.shards.operator import Collective
from stowplan.run.shards.overlap import OverlapsAgain
from stowplan.run.shards.parameters import ParameterShards
from stowplan.run.shards.processes import MeshLike
from stowplan.run.shards.second_gathers import NEVER, first_needs, with_second_gathers
from stowplan.run.shards.step import ShardedStep, ends_of, seeds_of, step_to_shard
from stowplan.run.shards.workers import Workers
from stowplan.run.step.function import tier_for
from stowplan.run.wrappers import with_forward
from stowplan.torch_private import OpOverload
from stowplan.units import format_bytes

if TYPE_CHECKING:
    from stowplan.run.iteration.planner import Variant

    InVariant: TypeAlias = tuple[PlannedStep, Variant | None]

Planned = TypeVar("Planned")
_FITS, _FAILED = 0, -1  # in place of the bytes that a worker would need


def agreed(
    workers: Workers, plan: Callable[[], Planned], allowed_bytes: int, device: torch.device
) -> Planned:
    """What `plan` makes on this worker, if it does so on all; else every worker raises.

    BudgetTooSmall then has the budget that all would fit into, and names the worker that needs it.
    """
    refusal: BudgetTooSmall | None = None
    try:
        planned, need = plan(), _FITS
    except BudgetTooSmall as fault:
        refusal, need = fault, fault.minimum_bytes
    except Exception:
        workers.all_gather([_FAILED], device)
        raise
    needs = [int(said) for (said,) in workers.all_gather([need], device)]
    if min(needs) == _FAILED:
        raise BadUse(f"worker {needs.index(_FAILED)} could not plan its part of the step; it says why")
    if max(needs) == _FITS:
        return planned
    raise _too_small(needs, refusal, allowed_bytes) from refusal


def _too_small(needs: list[int], own: BudgetTooSmall | None, allowed_bytes: int) -> BudgetTooSmall:
    largest = max(needs)
    refused = [worker for worker, need in enumerate(needs) if need != _FITS]
    told = f": {own}" if own is not None and own.minimum_bytes == largest else ""
    return BudgetTooSmall(
        f"{format_bytes(allowed_bytes)} allowed, too little for {len(refused)} of {len(needs)} workers:"
        f" worker {needs.index(largest)} needs {format_bytes(largest)} ({largest} bytes){told}",
        allowed_bytes=allowed_bytes,
        minimum_bytes=largest,
        binding=own.binding if own is not None else (),
    )


def subject_with_placeholders(step: ShardedStep, model: nn.Module, *, overlaps: bool = False) -> Subject:
    """A worker's step with placeholders, which is planned like any other step.

    With `overlaps`, it computes while messages travel, and cannot be tiled. What replaces the placeholders
    always does.
    """

    @wraps(type(model).forward)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        tensors = step.bound_to(self).tensors(args, kwargs)
        return step.run(tensors, with_placeholders=True, overlaps=overlaps)

    args, kwargs = step.example
    module = with_forward(model, forward)
    replacements = {} if step.parameters else _replacements(step)
    return Subject(capture(module, args, kwargs), module, args, kwargs, replacements)


def _replacements(step: ShardedStep) -> dict[OpOverload, Replacement]:
    buckets = {bucket.collective: bucket.parameters for bucket in step.buckets}

    def begin(call: Call, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        token, *flats = step.begun(values)
        return {
            _made_by(call): token,
            **{each.key: flat for each, flat in zip(buckets, flats, strict=True)},
        }

    def enter(call: Call, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        token, collective = call.args
        assert isinstance(token, Ref)
        assert isinstance(collective, Collective)
        names = buckets[collective]
        given = [values[name] for name in names]
        following, *parameters = entered(collective, values[collective.key], values[token.tensor], given)
        return {_made_by(call): following, **dict(zip(names, parameters, strict=True))}

    buckets_again = {torch.ops.stowplan.first_token.default: begin, torch.ops.stowplan.bring.default: enter}
    return {**buckets_again, **OverlapsAgain(step.overlapped).replacements}


def _made_by(call: Call) -> str:
    (name,) = call.outputs
    assert name is not None
    return name


PARAMETERS = ("replicate", "shard", "choose")
"""Every worker has the whole of them, its rows of them, or its rows if the whole does not fit."""

_FAST_ENOUGH = 1.02  # times the step in which nothing is recomputed: no other one is looked at

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
        if request.parameters not in PARAMETERS:
            raise BadUse(f"no parameters {request.parameters!r}; there is {', '.join(PARAMETERS)}")
        is_chosen = isinstance(request.mesh, int) or request.layouts != "follow"
        if request.parameters != "replicate" and is_chosen:
            raise BadUse('parameters="shard" is for a mesh such as data=4, and not for a chosen division')
        self._captured = step_to_shard(model, args, kwargs)
        self._device = device_of(self._captured.graph)

    def on(self, mesh: MeshLike | int) -> tuple[Attempt, tuple[Tried, ...]]:
        """The step on a mesh, or on the fastest mesh of a number of workers."""
        if isinstance(mesh, int) and self._request.dims is not None:
            raise BadUse("dims says what the axes of a mesh cut; of a number of workers, that is chosen")
        if not isinstance(mesh, int) and self._request.layouts == "follow":
            return self._on_given(mesh), ()
        options = self._options(mesh)
        found, tried = fastest_that_fits(
            options, lambda option: self._attempt(_place(mesh, option), option.chosen)
        )
        return self._taken(found), tried

    def _options(self, mesh: MeshLike | int) -> tuple[Option, ...]:
        """The same on all workers, for the machine that the first one is on."""
        graph = self._captured.graph
        meeting = Workers(Mesh((Axis("data", mesh),)) if isinstance(mesh, int) else mesh)
        meshes = meshes_for(graph, mesh) if isinstance(mesh, int) else (meeting.mesh,)
        machine = astuple(measure_machine(self._device))
        first = Machine(*meeting.all_gather(machine, self._device)[0])
        seeds = partial(seeds_of, self._captured, dims=self._request.dims)
        return options_of(graph, meshes, Environment(seeds, ends_of(self._captured), first, Network()))

    def _on_given(self, mesh: MeshLike) -> Attempt:
        has_optimizer = self._request.iteration is not None
        if self._request.parameters == "shard" or (has_optimizer and self._request.parameters == "choose"):
            return self._attempt_sharded(mesh)
        try:
            return self._taken(self._attempt(mesh))
        except BudgetTooSmall as refusal:
            if self._request.parameters == "replicate":
                raise
            whole = refusal
        try:
            return self._attempt_sharded(mesh)
        except BudgetTooSmall as refusal:
            raise min(whole, refusal, key=lambda each: each.minimum_bytes) from None

    def _attempt_sharded(self, mesh: MeshLike) -> Attempt:
        """The step with sharded parameters.

        If workers are alike, the first plans for all. Else each has a plan of its own.
        """
        workers, iteration = Workers(mesh), self._request.iteration
        shards = ParameterShards(self._model, self._captured, workers)
        shards.measure_network(self._device)
        undo = shards.divide(iteration.optimizer if iteration else None)
        allowed_bytes = self._request.budget_bytes
        try:
            captures = partial(self._captured_part, workers, shards)
            sharded, subject = agreed(workers, captures, allowed_bytes, self._device)
            if not sharded.plan.is_alike:
                return self._taken(self._own_plans(sharded, subject))
            plans = partial(self._first_variant, sharded, subject)
            own = agreed(workers, plans, allowed_bytes, self._device)
            variant, look, plan = workers.from_first(own)
            adopts = partial(self._alike, subject, variant, look, plan)
            captured = agreed(workers, adopts, allowed_bytes, self._device)
            planned = PlannedStep(replace(plan, graph=captured.graph), captured)
            seconds = plan.projected_seconds, plan.plain_seconds
            return self._taken(Attempt(sharded, planned, *seconds, variant))
        except BaseException:
            undo()
            raise

    def _taken(self, attempt: Attempt) -> Attempt:
        """The attempt that the workers will run, after each has reserved room for the optimizer's state."""
        iteration = self._request.iteration
        if iteration is not None and attempt.variant is not None:
            # No worker uses room that another may not have: all do the same.
            takes = partial(
                iteration.takes, attempt.variant, attempt.planned.captured, self._model, room_bytes=0
            )
            agreed(attempt.sharded.workers, takes, self._request.budget_bytes, self._device)
        return attempt

    def _captured_part(self, workers: Workers, shards: ParameterShards) -> tuple[ShardedStep, Subject]:
        given = self._model, self._args, self._kwargs
        dims = self._request.dims
        sharded = ShardedStep(*given, mesh=workers, dims=dims, captured=self._captured, parameters=shards)
        return sharded, subject_with_placeholders(sharded, self._model, overlaps=True)

    def _own_plans(self, sharded: ShardedStep, subject: Subject) -> Attempt:
        """The fastest of the steps that repeat no gather, half of them or all, and fit on each worker.

        The gathers to repeat are the first ones of forward: their parameters would wait for the longest time.
        If none of these steps fits, workers may use tiles in the one that repeats no gather.
        """
        workers, refusals, found = sharded.workers, list[BudgetTooSmall](), list[Attempt]()

        def attempt(plans: "Callable[[], InVariant]") -> None:
            try:
                planned = agreed(workers, plans, self._request.budget_bytes, self._device)
            except BudgetTooSmall as refusal:
                refusals.append(refusal)
            else:
                found.append(self._attempted(sharded, *planned))

        needs = workers.all_gather(first_needs(subject.captured), self._device)
        after = {n: int(min(own)) for n, own in enumerate(zip(*needs, strict=True)) if 0 < min(own) < NEVER}
        for count in dict.fromkeys((0, len(after) // 2, len(after))):
            repeated = dict(list(after.items())[:count])
            step = replace(subject, captured=with_second_gathers(subject.captured, repeated))
            attempt(partial(self._own_plan, sharded, step))
            if found and found[0].planned_seconds <= _FAST_ENOUGH * found[0].plain_seconds:
                break
        if not found and "tile" in self._request.options.allow:
            attempt(partial(self._own_plan_with_tiles, sharded))
        if not found:
            raise min(refusals, key=lambda each: each.minimum_bytes) from None
        return min(found, key=lambda each: each.planned_seconds)

    def _own_plan(self, sharded: ShardedStep, subject: Subject) -> "InVariant":
        options = self._request.options
        options = replace(options, allow=set(options.allow) - {"tile"})
        return self._first_that_fits(subject, partial(self._plan, sharded, options=options))

    def _first_that_fits(self, subject: Subject, plans: Callable[[Subject], PlannedStep]) -> "InVariant":
        """A plan, of an iteration in the first variant that has one."""
        iteration = self._request.iteration
        if iteration is None:
            return plans(subject), None
        variant, _, planned = iteration.planner.first_that_fits(subject, self._model, plans)
        return planned, variant

    def _own_plan_with_tiles(self, sharded: ShardedStep) -> "InVariant":
        """Messages are the same in number and order, with tiles and without."""
        subject = subject_with_placeholders(sharded, self._model)
        return self._plan(sharded, subject, self._request.options), None

    def _first_variant(
        self, sharded: ShardedStep, subject: Subject
    ) -> "tuple[Variant | None, str, Plan] | None":
        """On the first worker, a plan in the first variant of the iteration that fits; None on others."""
        if sharded.workers.rank:
            return None
        options, iteration = self._request.options, self._request.iteration
        plans = partial(self._plan, sharded, options=options)
        if iteration is None:
            return None, _look_of(subject.captured), plans(subject).plan
        variant, step, planned = iteration.planner.first_that_fits(subject, self._model, plans)
        return variant, _look_of(step.captured), planned.plan

    def _alike(self, subject: Subject, variant: "Variant | None", look: str, plan: Plan) -> Captured:
        """This worker's step with updates or tiles, which must be like that of the first worker."""
        own = self._with_updates(subject.captured, variant)
        if look != _look_of(own):
            raise BadUse(
                "worker 0 has a step of other ops or sizes: all workers must make the same call of fit, and a"
                ' result that all workers have must be a number for parameters="shard"'
            )
        self._set_room_aside(plan)
        return ADOPTED.of("tile")(plan, subject) if plan.tile_maps else own

    def _with_updates(self, captured: Captured, variant: "Variant | None") -> Captured:
        iteration = self._request.iteration
        return captured if iteration is None else iteration.planner.planned(captured, self._model, variant)

    def _attempt(self, mesh: MeshLike, chosen: Chosen | None = None) -> Attempt:
        workers = Workers(mesh)
        plan = partial(self._planned, workers, chosen)
        sharded, planned = agreed(workers, plan, self._request.budget_bytes, self._device)
        return self._attempted(sharded, *planned)

    def _attempted(self, sharded: ShardedStep, planned: PlannedStep, variant: "Variant | None") -> Attempt:
        """A step that all workers have planned, with the seconds of the slowest."""
        own = planned.plan.projected_seconds, planned.plan.plain_seconds
        slowest, plain = map(max, zip(*sharded.workers.all_gather(own, self._device), strict=True))
        return Attempt(sharded, planned, slowest, plain, variant)

    def _planned(self, workers: Workers, chosen: Chosen | None) -> "tuple[ShardedStep, InVariant]":
        """This worker's part of the step, as it fits beside what a step has to remember."""
        request = self._request
        given = self._model, self._args, self._kwargs
        iteration = request.iteration
        several = iteration is not None and iteration.accumulate > 1
        sharded = ShardedStep(
            *given,
            mesh=workers,
            dims=request.dims,
            chosen=chosen,
            captured=self._captured,
            is_last_backward=(lambda: iteration.is_last_backward) if iteration and several else None,
        )
        subject = subject_with_placeholders(sharded, self._model)
        if iteration is not None:
            with workers.rehearsing():
                subject = replace(subject, captured=subject.as_run(), replacements={})
        plans = partial(self._plan, sharded, options=request.options)
        return sharded, self._first_that_fits(subject, plans)

    def _plan(self, sharded: ShardedStep, subject: Subject, options: PlanOptions) -> PlannedStep:
        request = self._request
        beside = request.reserve_bytes + sharded.remembered_bytes
        try:
            with sharded.workers.rehearsing():
                planned = plan_step(subject, request.budget_bytes - beside, options)
        except BudgetTooSmall as refusal:
            raise refusal.beside(beside, "the reserve and buffers as they were before a step") from None
        self._set_room_aside(planned.plan)
        if not sharded.parameters:
            return planned
        room = planned.plan.allowed_bytes - replayed_bytes(planned.plan)
        return replace(planned, plan=with_early_gathers(planned.plan, room))

    def _set_room_aside(self, plan: Plan) -> None:
        """Reserve room in the tier for what the plan stores.

        A worker that found no room in its first step would leave the others waiting for its messages.
        """
        if plan.pricing.tier is not None:
            transfers = simulate(plan.graph, plan.steps, plan.pricing).transfers
            tier_for(self._device).reserve([each.nbytes for each in transfers if each.is_store])


def _look_of(captured: Captured) -> str:
    """A digest of the ops of a step and of the bytes of its tensors."""
    ops = [(op.id, op.type, *op.reads(), *op.writes()) for op in captured.graph.ops]
    sizes = [(name, tensor.nbytes) for name, tensor in captured.graph.tensors.items()]
    return sha256(repr((ops, sizes)).encode()).hexdigest()


def _place(mesh: MeshLike | int, option: Option) -> MeshLike:
    return option.mesh if isinstance(mesh, int) else mesh
