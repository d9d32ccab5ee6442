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
from stowplan.plan.draft import Draft
from stowplan.plan.judge.simulate import simulate
from stowplan.plan.options import PlanOptions
from stowplan.plan.pricing import Machine
from stowplan.plan.problem import slices_last
from stowplan.request import Request
from stowplan.run.cost.machine import device_of, measure_machine
from stowplan.run.planning.planner import DraftedStep, PlannedStep, Subject, draft_step, replayed_bytes
from stowplan.run.planning.recapture import Replacement
from stowplan.run.planning.saved import ADOPTED
from stowplan.run.step.function import tier_for
from stowplan.run.wrappers import with_forward
from stowplan.techniques.shards.plan.early_gathers import with_early_gathers
from stowplan.techniques.shards.plan.mesh import Axis, MeshAxes
from stowplan.techniques.shards.plan.options import Environment, Option, meshes_for, options_of
from stowplan.techniques.shards.plan.projection import Network
from stowplan.techniques.shards.plan.propagation import Chosen
from stowplan.techniques.shards.run.actions import entered
from stowplan.techniques.shards.run.choosing import Attempt, StepOnMesh, Tried, fastest_that_fits
from stowplan.techniques.shards.run.operator import Collective
from stowplan.techniques.shards.run.overlap import OverlapsAgain
from stowplan.techniques.shards.run.parameters import ParameterShards
from stowplan.techniques.shards.run.processes import MeshLike
from stowplan.techniques.shards.run.second_gathers import NEVER, first_needs, with_second_gathers
from stowplan.techniques.shards.run.step import ShardedStep, ends_of, seeds_of, step_to_shard
from stowplan.techniques.shards.run.workers import Workers
from stowplan.torch_private import OpOverload
from stowplan.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from stowplan.techniques.iteration.run.iteration import RunningIteration
    from stowplan.techniques.iteration.run.planner import Variant

    InVariant: TypeAlias = tuple[DraftedStep, Variant | None]

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


_FAST_ENOUGH = 1.02  # times the step in which nothing is recomputed: no other one is looked at


class ShardPlanner:
    """Captures a model's step once and plans it on meshes."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        request: Request,
        iteration: "RunningIteration | None",
    ) -> None:
        """Each worker has the request's budget, of which its reserve stays free."""
        assert request.mesh is not None
        self._model, self._args, self._kwargs, self._mesh = model, args, kwargs, request.mesh
        self._budget_bytes, self._reserve_bytes = (
            parse_bytes(request.budget, "budget"),
            request.reserve_bytes,
        )
        self._iteration = iteration
        self._options = iteration.planner.options(request.options) if iteration else request.options
        self._captured = step_to_shard(model, args, kwargs)
        self._device = device_of(self._captured.graph)

    def on(self, mesh: MeshLike | int) -> tuple[StepOnMesh, tuple[Tried, ...]]:
        """The step on a mesh, or on the fastest mesh of a number of workers."""
        if not isinstance(mesh, int) and self._mesh.layouts == "follow":
            return self._on_given(mesh), ()
        options = self._divisions(mesh)
        found, tried = fastest_that_fits(
            options, lambda option: self._attempt(_place(mesh, option), option.chosen)
        )
        return self._taken(found), tried

    def _divisions(self, mesh: MeshLike | int) -> tuple[Option, ...]:
        """The same on all workers, for the machine that the first one is on."""
        graph = self._captured.graph
        meeting = Workers(MeshAxes((Axis("data", mesh),)) if isinstance(mesh, int) else mesh)
        meshes = meshes_for(graph, mesh) if isinstance(mesh, int) else (meeting.mesh,)
        machine = astuple(measure_machine(self._device))
        first = Machine(*meeting.all_gather(machine, self._device)[0])
        seeds = partial(seeds_of, self._captured, dims=self._mesh.dims)
        return options_of(graph, meshes, Environment(seeds, ends_of(self._captured), first, Network()))

    def _on_given(self, mesh: MeshLike) -> StepOnMesh:
        has_optimizer = self._iteration is not None
        if self._mesh.parameters == "shard" or (has_optimizer and self._mesh.parameters == "choose"):
            return self._attempt_sharded(mesh)
        try:
            return self._taken(self._attempt(mesh))
        except BudgetTooSmall as refusal:
            if self._mesh.parameters == "replicate":
                raise
            whole = refusal
        try:
            return self._attempt_sharded(mesh)
        except BudgetTooSmall as refusal:
            raise min(whole, refusal, key=lambda each: each.minimum_bytes) from None

    def _attempt_sharded(self, mesh: MeshLike) -> StepOnMesh:
        """The step with sharded parameters.

        If workers are alike, the first plans for all. Else each has a plan of its own.
        """
        workers, iteration = Workers(mesh), self._iteration
        shards = ParameterShards(self._model, self._captured, workers)
        shards.measure_network(self._device)
        undo = shards.divide(iteration.optimizer if iteration else None)
        allowed_bytes = self._budget_bytes
        try:
            captures = partial(self._captured_part, workers, shards)
            sharded, subject = agreed(workers, captures, allowed_bytes, self._device)
            if not sharded.plan.is_alike:
                return self._taken(self._own_plans(sharded, subject))
            plans = partial(self._first_variant, sharded, subject)
            own = agreed(workers, plans, allowed_bytes, self._device)
            variant, look, draft = workers.from_first(own)
            adopts = partial(self._alike, subject, variant, look, draft)
            captured = agreed(workers, adopts, allowed_bytes, self._device)
            drafted = DraftedStep(replace(draft, graph=slices_last(captured.graph)), captured)
            seconds = draft.projected_seconds, draft.plain_seconds
            return self._taken(Attempt(sharded, drafted, *seconds, variant))
        except BaseException:
            undo()
            raise

    def _taken(self, attempt: Attempt) -> StepOnMesh:
        """What the workers will run, after each verified its plan and reserved room for optimizer state."""
        workers = attempt.sharded.workers
        planned = agreed(workers, partial(self._planned_by, attempt), self._budget_bytes, self._device)
        return StepOnMesh(attempt.sharded, planned)

    def _planned_by(self, attempt: Attempt) -> PlannedStep:
        planned, iteration = attempt.drafted.verified(), self._iteration
        if iteration is not None and attempt.variant is not None:
            # No worker uses room that another may not have: all do the same.
            iteration.takes(attempt.variant, planned.captured, self._model, room_bytes=0)
        return planned

    def _captured_part(self, workers: Workers, shards: ParameterShards) -> tuple[ShardedStep, Subject]:
        given = self._model, self._args, self._kwargs
        dims = self._mesh.dims
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
                planned = agreed(workers, plans, self._budget_bytes, self._device)
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
        if not found and "tile" in self._options.allow:
            attempt(partial(self._own_plan_with_tiles, sharded))
        if not found:
            raise min(refusals, key=lambda each: each.minimum_bytes) from None
        return min(found, key=lambda each: each.planned_seconds)

    def _own_plan(self, sharded: ShardedStep, subject: Subject) -> "InVariant":
        options = self._options
        options = replace(options, allow=set(options.allow) - {"tile"})
        return self._first_that_fits(subject, partial(self._plan, sharded, options=options))

    def _first_that_fits(self, subject: Subject, plans: Callable[[Subject], DraftedStep]) -> "InVariant":
        """A plan, of an iteration in the first variant that has one."""
        iteration = self._iteration
        if iteration is None:
            return plans(subject), None
        variant, _, drafted = iteration.planner.first_that_fits(subject, self._model, plans)
        return drafted, variant

    def _own_plan_with_tiles(self, sharded: ShardedStep) -> "InVariant":
        """Messages are the same in number and order, with tiles and without."""
        subject = subject_with_placeholders(sharded, self._model)
        return self._plan(sharded, subject, self._options), None

    def _first_variant(
        self, sharded: ShardedStep, subject: Subject
    ) -> "tuple[Variant | None, str, Draft] | None":
        """On the first worker, a draft in the first variant of the iteration that fits; None on others."""
        if sharded.workers.rank:
            return None
        options, iteration = self._options, self._iteration
        plans = partial(self._plan, sharded, options=options)
        if iteration is None:
            return None, _look_of(subject.captured), plans(subject).draft
        variant, step, drafted = iteration.planner.first_that_fits(subject, self._model, plans)
        return variant, _look_of(step.captured), drafted.draft

    def _alike(self, subject: Subject, variant: "Variant | None", look: str, draft: Draft) -> Captured:
        """This worker's step with updates or tiles, which must be like that of the first worker."""
        own = self._with_updates(subject.captured, variant)
        if look != _look_of(own):
            raise BadUse(
                "worker 0 has a step of other ops or sizes: all workers must make the same call of fit, and a"
                ' result that all workers have must be a number for parameters="shard"'
            )
        self._set_room_aside(draft)
        return ADOPTED.of("tile")(draft, subject) if draft.tile_maps else own

    def _with_updates(self, captured: Captured, variant: "Variant | None") -> Captured:
        iteration = self._iteration
        return captured if iteration is None else iteration.planner.planned(captured, self._model, variant)

    def _attempt(self, mesh: MeshLike, chosen: Chosen | None = None) -> Attempt:
        workers = Workers(mesh)
        plan = partial(self._planned, workers, chosen)
        sharded, planned = agreed(workers, plan, self._budget_bytes, self._device)
        return self._attempted(sharded, *planned)

    def _attempted(self, sharded: ShardedStep, drafted: DraftedStep, variant: "Variant | None") -> Attempt:
        """A step that all workers have planned, with the seconds of the slowest."""
        own = drafted.draft.projected_seconds, drafted.draft.plain_seconds
        slowest, plain = map(max, zip(*sharded.workers.all_gather(own, self._device), strict=True))
        return Attempt(sharded, drafted, slowest, plain, variant)

    def _planned(self, workers: Workers, chosen: Chosen | None) -> "tuple[ShardedStep, InVariant]":
        """This worker's part of the step, as it fits beside what a step has to remember."""
        given = self._model, self._args, self._kwargs
        iteration = self._iteration
        several = iteration is not None and iteration.accumulate > 1
        sharded = ShardedStep(
            *given,
            mesh=workers,
            dims=self._mesh.dims,
            chosen=chosen,
            captured=self._captured,
            is_last_backward=(lambda: iteration.is_last_backward) if iteration and several else None,
        )
        subject = subject_with_placeholders(sharded, self._model)
        if iteration is not None:
            with workers.rehearsing():
                subject = replace(subject, captured=subject.as_run(), replacements={})
        plans = partial(self._plan, sharded, options=self._options)
        return sharded, self._first_that_fits(subject, plans)

    def _plan(self, sharded: ShardedStep, subject: Subject, options: PlanOptions) -> DraftedStep:
        beside = self._reserve_bytes + sharded.remembered_bytes
        try:
            with sharded.workers.rehearsing():
                drafted = draft_step(subject, self._budget_bytes - beside, options)
        except BudgetTooSmall as refusal:
            raise refusal.beside(beside, "the reserve and buffers as they were before a step") from None
        draft = drafted.draft
        self._set_room_aside(draft)
        if not sharded.parameters:
            return drafted
        room = draft.allowed_bytes - replayed_bytes(draft)
        return replace(drafted, draft=with_early_gathers(draft, room))

    def _set_room_aside(self, draft: Draft) -> None:
        """Reserve room in the tier for what the plan stores.

        A worker that found no room in its first step would leave the others waiting for its messages.
        """
        if draft.pricing.tier is not None:
            transfers = simulate(draft.graph, draft.steps, draft.pricing).transfers
            tier_for(self._device).reserve([each.nbytes for each in transfers if each.is_store])


def _look_of(captured: Captured) -> str:
    """A digest of the ops of a step and of the bytes of its tensors."""
    ops = [(op.id, op.type, *op.reads(), *op.writes()) for op in captured.graph.ops]
    sizes = [(name, tensor.nbytes) for name, tensor in captured.graph.tensors.items()]
    return sha256(repr((ops, sizes)).encode()).hexdigest()


def _place(mesh: MeshLike | int, option: Option) -> MeshLike:
    return option.mesh if isinstance(mesh, int) else mesh
