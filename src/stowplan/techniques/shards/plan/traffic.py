"""Traffic: the exact bytes that each worker of a plan sends in a step, forward and backward."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from stowplan.errors import MissingRule
from stowplan.ir import Graph, Kind
from stowplan.ops.regions.rules import dim_of
from stowplan.ops.table import site_of
from stowplan.techniques.shards.plan.buckets import buckets_of
from stowplan.techniques.shards.plan.plan import ShardPlan
from stowplan.techniques.shards.plan.propagation import LOOKUPS, SUMMED, TOGETHER, ShardingKind
from stowplan.techniques.shards.plan.shard import ShardLevel
from stowplan.techniques.shards.plan.weights import PRODUCTS

_LOSS_BYTES = 16  # a sum and a weight, in float64
_LEAST_ITEMSIZE = 4  # of what is known of a softmax's lines: float32 at least


@dataclass(frozen=True, slots=True)
class Traffic:
    """One worker's step: bytes and messages to others, bytes that it hands to sums, number of sums."""

    sent_bytes: int
    messages: int
    summed_bytes: int
    sums: int


def traffic_of(plan: ShardPlan) -> tuple[Traffic, ...]:
    """By worker. What is received forward is answered by its gradient backward."""
    sent = [0] * plan.mesh.size
    messages = [0] * plan.mesh.size
    for worker in range(plan.mesh.size):
        for transfer in plan.received(worker):
            nbytes = transfer.rect.volume * itemsize_of(plan.graph, transfer.tensor)
            back = transfer.tensor in plan.differentiated
            sent[transfer.source] += nbytes
            sent[worker] += nbytes * back
            messages[transfer.source] += 1
            messages[worker] += back
    summed = (summed_by(plan, worker) for worker in range(plan.mesh.size))
    return tuple(
        Traffic(s, m, nbytes, count) for s, m, (nbytes, count) in zip(sent, messages, summed, strict=True)
    )


def trained_bytes(plan: ShardPlan) -> int:
    """The gradients of the parameters, which are summed over the whole mesh once a step."""
    tensors = plan.graph.tensors
    wanted = {tensor.gradient_of for tensor in tensors.values()}
    trained = [t for t in tensors.values() if t.kind is Kind.PARAMETER and t.id in wanted]
    return sum(tensor.nbytes or 0 for tensor in trained)


def itemsize_of(graph: Graph, name: str) -> int:
    """Bytes of one element of a tensor."""
    dtype = graph.tensors[name].dtype
    if dtype is None:
        raise MissingRule(f"the element type of tensor {name!r} is not known")
    return dtype.itemsize


def sums_of(plan: ShardPlan, worker: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """The axes and bytes of each sum that a worker takes part in, but for those of parameters' gradients."""
    for level in plan.shards[worker].levels:
        if level.sharding.kind in TOGETHER:
            forward, backward = _payloads(plan, level)
            yield from ((level.sharding.summed_axes, nbytes) for nbytes in (*forward, *backward))


def summed_by(plan: ShardPlan, worker: int) -> tuple[int, int]:
    """Bytes that a worker hands to sums in a step, parameters' gradients included, and how many sums."""
    sums = [nbytes for _, nbytes in sums_of(plan, worker)]
    return trained_bytes(plan) + sum(sums), len(buckets_of(plan.graph)) + len(sums)


def _payloads(plan: ShardPlan, level: ShardLevel) -> tuple[list[int], list[int]]:
    """Bytes of the sums of one op, forward and backward."""
    source = level.sharding.op.inputs[0].tensor
    back = is_differentiated(plan, level)
    if level.sharding.kind is ShardingKind.NORM:
        statistic = _channels(plan, level) * itemsize_of(plan.graph, source)
        return [statistic, statistic], [2 * statistic]
    if level.sharding.kind is ShardingKind.SOFTMAX:
        statistic = _lines(plan, level) * max(_LEAST_ITEMSIZE, itemsize_of(plan.graph, source))
        return [statistic, statistic], [statistic] * back
    nbytes = _LOSS_BYTES
    if level.sharding.op.type in (*SUMMED, *PRODUCTS, *LOOKUPS):
        nbytes = level.made.volume * itemsize_of(plan.graph, level.name)
    return [nbytes], [nbytes] * back


def is_differentiated(plan: ShardPlan, level: ShardLevel) -> bool:
    """Whether gradients flow back through the sum of an op."""
    op = level.sharding.op
    summed = level.name if op.type in (*PRODUCTS, *LOOKUPS) else op.inputs[0].tensor
    return summed in plan.differentiated


def _channels(plan: ShardPlan, level: ShardLevel) -> int:
    source, need = level.sharding.op.inputs[0].tensor, level.needs[0]
    assert need is not None
    shape = plan.layouts[source].cells.local(need).shape
    groups = level.sharding.op.attributes.get("group")
    return shape[0] * groups if isinstance(groups, int) else prod(shape[1:2])


def _lines(plan: ShardPlan, level: ShardLevel) -> int:
    """How many lines a worker's part of a softmax has."""
    site = site_of(plan.graph, level.sharding.op)
    cells = plan.layouts[level.name].cells
    shape = cells.local(level.made).shape
    along = dim_of(site, len(shape))
    return prod(size for dim, size in enumerate(shape) if dim != along)
