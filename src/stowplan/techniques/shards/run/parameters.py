"""Sharded parameters: each worker of a mesh has its rows of every parameter, and of its state.

The parameters of the model stay the same objects, so that an optimizer keeps them; they hold the worker's
rows in place of the whole. The step gathers the whole again where an op reads it. Rows are divided over all
workers, whatever their axes: each has a part of the gradient, so a sum over all of them is due anyway.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stowplan.capture import Captured
from stowplan.ops.effects import BEGIN_GATHER, BEGIN_IN_ORDER
from stowplan.ops.table import shape_of
from stowplan.plan.steps import Compute, RecomputeOp
from stowplan.run.cost.machine import Cost
from stowplan.run.cost.probe import PROBES, Signature, probed_cost
from stowplan.run.planning.planner import PlannedStep
from stowplan.techniques.shards.plan.parameter_shards import gather_groups, part_of
from stowplan.techniques.shards.plan.plan import ShardPlan
from stowplan.techniques.shards.plan.projection import Network
from stowplan.techniques.shards.run.actions import GatherParameters
from stowplan.techniques.shards.run.gather import Gather, Rows
from stowplan.techniques.shards.run.operator import Collective
from stowplan.techniques.shards.run.second_gathers import GATHERS_IN_ORDER, SCATTER_SUM_IN_ORDER
from stowplan.techniques.shards.run.workers import Workers

_GATHERS = (BEGIN_GATHER, *GATHERS_IN_ORDER)
_SUMS = ("stowplan.scatter_sum.default", SCATTER_SUM_IN_ORDER)

_PROBED_BYTES = 2**20


@dataclass(slots=True)
class _Divided:
    """A parameter, and how its rows are divided."""

    parameter: nn.Parameter
    rows: Rows


class ParameterShards:
    """The parameters that a captured step reads, divided over the workers of a mesh."""

    def __init__(self, model: nn.Module, captured: Captured, workers: Workers) -> None:
        self._workers, self._captured = workers, captured
        self.is_divided = False
        self._divided = {
            name: _Divided(
                model.get_parameter(names[0]), Rows(shape_of(captured.graph.tensors[name]), workers.mesh.size)
            )
            for name, names in captured.program.parameters.items()
        }
        self._network = Network(0.0, float("inf"))

    def rows_of(self, parameter: Tensor) -> Rows | None:
        """How a parameter is divided; None if it is not."""
        return next((each.rows for each in self._divided.values() if each.parameter is parameter), None)

    def measure_network(self, device: torch.device) -> None:
        """Find the price of a message, the same on all workers."""
        seconds = [_seconds_to_gather(self._workers, size, device) for size in (1, _PROBED_BYTES // 4)]
        found = self._workers.all_gather(seconds, device)
        peers = max(1, self._workers.mesh.size - 1)
        latency, filled = (max(times) / peers for times in zip(*found, strict=True))
        self._network = Network(latency, _PROBED_BYTES / max(1e-9, filled - latency))

    def gathers(self, plan: ShardPlan) -> tuple[GatherParameters, ...]:
        """What is gathered together, in the order of first uses."""
        graph, program = self._captured.graph, self._captured.program
        groups = gather_groups(graph, self._divided, program.gradients)
        return tuple(self.gather(names, plan) for names in groups)

    def gather(self, names: tuple[str, ...], plan: ShardPlan) -> GatherParameters:
        """A gather of these parameters; of a weight that an axis cuts, of the part that a worker reads."""
        rows, cut = tuple(self._divided[name].rows for name in names), frozenset(plan.cut_weights)
        parts = tuple(
            tuple(part_of(plan, name, worker) for worker in plan.shards) if name in cut else None
            for name in names
        )
        price = self._network.latency_seconds, self._network.bytes_per_second
        operation = Gather(self._workers, rows, *price, parts)
        spelled = ", ".join("x".join(map(str, shape)) or "scalar" for shape in operation.shapes)
        collective = Collective(f"{self._workers.mesh}: {spelled}", operation)
        return GatherParameters(names, collective, in_order=not plan.is_alike)

    def divide(self, optimizer: Optimizer | None) -> Callable[[], None]:
        """Leave this worker its rows of parameters and of their state; the result takes it back."""
        rank = self._workers.rank
        before: list[Callable[[], None]] = []
        for each in self._divided.values():
            parameter, rows = each.parameter, each.rows
            state = {} if optimizer is None else optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
                    before.append(_setting(state, key, value))
                    state[key] = rows.shard(value, rank)
            before.append(_resetting(parameter, parameter.data))
            parameter.grad = None
            parameter.data = rows.shard(parameter.data, rank)
        self.is_divided = True

        def undo() -> None:
            for restore in before:
                restore()
            self.is_divided = False

        return undo

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside this context every worker has whole parameters; all workers must come here.

        Changes of them are kept: afterwards each worker has its rows of what they are then.
        """
        own, sent_bytes = self._workers.rank, self._workers.sent_bytes
        shards: dict[str, Tensor] = {}
        for name, each in self._divided.items():
            shards[name] = each.parameter.data
            (whole,) = Gather(self._workers, (each.rows,)).forward([each.parameter.data])
            each.parameter.grad = None
            each.parameter.data = whole
        self._workers.sent_bytes = sent_bytes  # this is not part of a step
        self.is_divided = False
        try:
            yield
        finally:
            for name, each in self._divided.items():
                rows = each.rows.of(each.parameter.data, own)
                shards[name][: len(rows)] = rows
                each.parameter.grad = None
                each.parameter.data = shards[name]
            self.is_divided = True


def gathered_bytes(planned: PlannedStep) -> int:
    """The bytes that this worker sends for the gathers and sums of parameters in a planned step."""
    calls = planned.captured.program.calls
    items = {op.id: op.outputs[0].tensor for op in planned.captured.graph.ops if op.outputs}
    total = 0
    for step in planned.plan.steps:
        if isinstance(step, Compute | RecomputeOp) and (kind := str(calls[step.op].target)) in (
            *_GATHERS,
            *_SUMS,
        ):
            dtype = planned.captured.graph.tensors[items[step.op]].dtype
            assert dtype is not None
            operation = _operation_of(calls[step.op].args)
            total += operation.sent_elements(is_backward=kind in _SUMS) * dtype.itemsize
    return total


def _operation_of(args: tuple[Any, ...]) -> Gather:
    (collective,) = (arg for arg in args if isinstance(arg, Collective))
    return collective.of_kind(Gather)


def _seconds_to_gather(workers: Workers, elements: int, device: torch.device) -> float:
    """The fastest of a few gathers of this many float32 of each worker."""
    gather = Gather(workers, (Rows((workers.mesh.size * elements,), workers.mesh.size),))
    shard, times, sent = torch.zeros(elements, device=device), list[float](), workers.sent_bytes
    for _ in range(3):
        begun = perf_counter()
        gather.forward([shard])
        times.append(perf_counter() - begun)
    workers.sent_bytes = sent  # not part of a step
    return min(times)


def _setting(state: dict[str, Any], key: str, value: Tensor) -> Callable[[], None]:
    def restore() -> None:
        state[key] = value

    return restore


def _resetting(parameter: nn.Parameter, whole: Tensor) -> Callable[[], None]:
    def restore() -> None:
        parameter.grad = None
        parameter.data = whole

    return restore


def _probed(signature: Signature, device: torch.device) -> Cost | None:
    """What this worker does itself, and the messages."""
    own = probed_cost(signature, device, repeats=3)
    kind, itemsize = str(signature.call.target), signature.operands[0].dtype.itemsize
    gather = _operation_of(signature.call.args)
    count = len(gather.rows) if kind in (BEGIN_GATHER, BEGIN_IN_ORDER) else 1
    seconds = gather.seconds(itemsize, is_backward=kind in _SUMS, messages=count)
    return None if own is None else Cost(own.seconds + seconds, own.rise_bytes)


PROBES.update(dict.fromkeys((*_GATHERS, *_SUMS), _probed))
