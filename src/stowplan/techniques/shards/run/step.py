"""ShardedStep: the training step of a model as one worker of a mesh takes part in it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from stowplan.capture import Captured, Ref, capture
from stowplan.capture.changes import changes_of
from stowplan.capture.composite import buffer_named
from stowplan.capture.cuda_calls import OwnBatchNorms
from stowplan.capture.stand_ins import flatten
from stowplan.errors import BadUse, NotTileable
from stowplan.ir import Graph, Kind
from stowplan.ir import Tensor as Described
from stowplan.ops.table import shape_of
from stowplan.run.parts.part import index_of
from stowplan.run.planning.planner import PlannedStep
from stowplan.run.planning.recapture import check_differentiable
from stowplan.run.step.last_uses import last_uses
from stowplan.run.step.straight import Binding
from stowplan.techniques.shards.plan.buckets import buckets_of
from stowplan.techniques.shards.plan.mesh import MeshAxes
from stowplan.techniques.shards.plan.plan import ShardPlan, shard_plan
from stowplan.techniques.shards.plan.propagation import Chosen
from stowplan.techniques.shards.plan.seeds import seeds_for
from stowplan.techniques.shards.plan.traffic import traffic_of
from stowplan.techniques.shards.run.actions import EnterBucket, LocalValues, SwapHalos
from stowplan.techniques.shards.run.bucket import Bucket, Earlier
from stowplan.techniques.shards.run.functions import EndOfSums
from stowplan.techniques.shards.run.local import LocalStep
from stowplan.techniques.shards.run.operator import Collective, after_collectives, first_token
from stowplan.techniques.shards.run.parameters import ParameterShards, gathered_bytes
from stowplan.techniques.shards.run.processes import MeshLike
from stowplan.techniques.shards.run.workers import Workers
from stowplan.torch_private import pytree

_trained: Any = EndOfSums.apply


class ShardedStep:
    """Called with this worker's shares of the arguments; returns its shares of the results.

    A result without dims, such as the loss, is the same on all workers.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[object, ...],
        kwargs: Mapping[str, object] | None = None,
        *,
        mesh: MeshLike | Workers,
        dims: Chosen | None = None,
        chosen: Chosen | None = None,
        captured: Captured | None = None,
        parameters: ParameterShards | None = None,
        is_last_backward: Callable[[], bool] | None = None,
    ) -> None:
        """`parameters` are those of which each worker has its rows; they are gathered in the step.

        With `is_last_backward`, whole gradients are summed over the workers in the last backward alone.
        """
        captured = captured or step_to_shard(model, args, kwargs)
        self.captured, self.workers = captured, mesh if isinstance(mesh, Workers) else Workers(mesh)
        self.plan = plan_sharded(captured, self.workers.mesh, dims, chosen)
        self.workers.join(sharding.summed_axes for sharding in self.plan.shardings if sharding.summed_axes)
        self.parameters = parameters
        self.buckets = () if parameters else tuple(self._entries(captured, model, is_last_backward))
        local = LocalStep(captured, self.plan, self.workers, self.buckets, parameters)
        self._actions = tuple(local.actions())
        self._frees = last_uses([action.touches() for action in self._actions], ends_of(captured))
        self._local = _local(captured, self.plan, self.workers.rank)
        self._binding = self.bound_to(model)

    def _entries(
        self, captured: Captured, model: nn.Module, is_last: Callable[[], bool] | None
    ) -> Iterator[EnterBucket]:
        """Buckets of trained parameters, whose gradients are summed over the whole mesh."""
        trained = [name for name in captured.program.gradients if name in captured.program.parameters]
        for number, names in enumerate(buckets_of(captured.graph, trained)):
            shapes = tuple(shape_of(captured.graph.tensors[name]) for name in names)
            known = (captured.program.parameters[name][0] for name in names)
            earlier = Earlier(tuple(map(model.get_parameter, known)), is_last) if is_last else None
            bucket = Bucket(self.workers, self.workers.everyone, shapes, earlier)
            yield EnterBucket(names, Collective(f"bucket {number}", bucket))

    def bound_to(self, model: nn.Module) -> Binding:
        """This worker's step on the parameters and buffers of a model."""
        return Binding(self._local, model)

    @property
    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments like those that this worker is called with, without contents.

        A capture asks tensors for their device: those of a CPU need no memory, others take theirs.
        """
        tensors, program = self._local.graph.tensors, self.captured.program
        leaves: list[object] = [None if name is None else _like(tensors[name]) for name in program.inputs]
        like: tuple[tuple[Any, ...], dict[str, Any]] = program.input_spec.unflatten(leaves)
        return like

    def share(self, *args: object, **kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """This worker's part of arguments that are whole."""
        leaves, spec = flatten(args, kwargs)
        names = self.captured.program.inputs
        found: list[object] = [
            leaf if name is None else self._own(name, leaf) for name, leaf in zip(names, leaves, strict=True)
        ]
        own: tuple[tuple[Any, ...], dict[str, Any]] = spec.unflatten(found)
        return own

    def _own(self, name: str, whole: object) -> Tensor:
        assert isinstance(whole, Tensor)
        share = self.plan.layouts[name].share(self.plan.mesh, self.workers.rank)
        return whole[index_of(share)].clone()

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The results for this worker's part of the arguments."""
        tensors = self._binding.tensors(args, kwargs)
        self.workers.begin(tensors[buffer] for buffer in self.captured.program.updates)
        return self.run(tensors)

    def begun(self, parameters: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The first token, and a flat tensor for each bucket."""
        trained = (parameters[name] for bucket in self.buckets for name in bucket.parameters)
        found: tuple[Tensor, ...] = _trained([bucket.collective for bucket in self.buckets], *trained)
        return found

    def sum_earlier(self) -> None:
        """Sum gradients of backwards that were not the last over the workers; all must come here."""
        for bucket in self.buckets:
            bucket.collective.of_kind(Bucket).sum_earlier()

    def whole(self) -> AbstractContextManager[None]:
        """Inside this context parameters are whole on every worker, as for evaluation; all must come here."""
        return nullcontext() if self.parameters is None else self.parameters.whole()

    def changed_in(self, model: nn.Module) -> list[Tensor]:
        """The buffers of a model that its step changes."""
        program = self.captured.program
        return [buffer_named(model, program.buffers[name][0]) for name in program.updates]

    @property
    def overlapped(self) -> dict[Collective, tuple[str, str | None]]:
        """Exchanges with the weight and bias whose gradients are computed while messages travel."""
        swaps = (action for action in self._actions if isinstance(action, SwapHalos))
        return {
            swap.collective: (swap.ahead.weight, swap.ahead.bias) for swap in swaps if swap.ahead is not None
        }

    @property
    def remembered_bytes(self) -> int:
        """Of buffers as they were before a step, for the case that a worker is lost in it."""
        changed = (self.captured.graph.tensors[buffer] for buffer in self.captured.program.updates)
        return sum(buffer.nbytes or 0 for buffer in changed)

    def sent_bytes(self, planned: PlannedStep) -> int:
        """The bytes that this worker sends to others in a planned step, beside what it hands to sums."""
        return traffic_of(self.plan)[self.workers.rank].sent_bytes + gathered_bytes(planned)

    def run(
        self, tensors: Mapping[str, Tensor], *, with_placeholders: bool = False, overlaps: bool = True
    ) -> object:
        """Run all actions on tensors by the names of the captured graph.

        Gradients are summed over the workers in buckets; `with_placeholders`, they are this worker's alone.
        Without `overlaps`, nothing is computed while messages travel.
        """
        program = self.captured.program
        parts = dict(tensors)
        first = parts[next(name for name in program.gradients if name in program.parameters)]
        token, *flats = (first_token(first),) if with_placeholders else self.begun(parts)
        values = LocalValues(parts, token, flats, tensors, overlaps=overlaps)
        for action, gone in zip(self._actions, self._frees, strict=True):
            action.run(values)
            for name in gone:
                values.parts.pop(name, None)
        with torch.no_grad():
            for buffer, value in program.updates.items():
                tensors[buffer].copy_(values.parts[value])
        return self._returned(values)

    def _returned(self, values: LocalValues) -> object:
        program, mesh, rank = self.captured.program, self.plan.mesh, self.workers.rank
        names = list(dict.fromkeys(leaf.tensor for leaf in program.outputs if isinstance(leaf, Ref)))
        layouts = self.plan.layouts
        found = {
            name: after_collectives(values.parts[name], values.token, layouts[name].is_first(mesh, rank))
            for name in names
        }
        leaves = [found[leaf.tensor] if isinstance(leaf, Ref) else leaf for leaf in program.outputs]
        return pytree.tree_unflatten(leaves, program.output_spec)


def step_to_shard(
    model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object] | None = None
) -> Captured:
    """The whole step, captured; BadUse if it is none, or hides from autograd what it does."""
    on_cuda = any(parameter.is_cuda for parameter in model.parameters())
    captured = capture(model, args, kwargs, cuda=OwnBatchNorms() if on_cuda else None)
    if changes := changes_of(captured.program.output_spec):
        raise BadUse(f"not sharded: forward {changes.told()}, which the workers would not do alike")
    for name in captured.program.updates:
        if name not in captured.program.buffers:
            raise BadUse(f"not sharded: forward writes into {name}, which is no buffer")
    try:
        check_differentiable(captured, model, args, kwargs)
    except NotTileable as refusal:
        raise BadUse(f"not sharded: {refusal.reason}") from refusal
    if not any(name in captured.program.parameters for name in captured.program.gradients):
        raise BadUse("no parameter of the model has a gradient: there is no training step to shard")
    return captured


def plan_sharded(
    captured: Captured, mesh: MeshAxes, dims: Chosen | None = None, chosen: Chosen | None = None
) -> ShardPlan:
    """The plan of a captured step on a mesh; of inputs without `dims`, its axes cut what their names say."""
    return shard_plan(captured.graph, mesh, seeds_of(captured, mesh, dims), ends_of(captured), chosen)


def seeds_of(captured: Captured, mesh: MeshAxes, dims: Chosen | None = None) -> Chosen:
    """By input the dim that each axis cuts: as `dims` has it, else by the names of the axes."""
    inputs = {name for name in captured.program.inputs if name is not None}
    seeds = dict(dims or {})
    return seeds if seeds.keys() >= inputs else {**seeds_for(captured.graph, mesh), **seeds}


def ends_of(captured: Captured) -> tuple[str, ...]:
    """The results of a step, and the new contents of buffers."""
    outputs = [leaf.tensor for leaf in captured.program.outputs if isinstance(leaf, Ref)]
    return (*outputs, *captured.program.updates.values())


def _local(captured: Captured, plan: ShardPlan, rank: int) -> Captured:
    """The step with the shapes that this worker's arguments have."""
    tensors = dict(captured.graph.tensors)
    for name, tensor in tensors.items():
        if tensor.kind is Kind.INPUT:
            tensors[name] = replace(tensor, shape=plan.layouts[name].share(plan.mesh, rank).shape)
    return replace(captured, graph=Graph(tensors, captured.graph.ops, captured.graph.held))


def _like(tensor: Described) -> Tensor:
    device = "meta" if tensor.device in ("", "cpu") else tensor.device
    return torch.empty(shape_of(tensor), dtype=getattr(torch, str(tensor.dtype)), device=device)
