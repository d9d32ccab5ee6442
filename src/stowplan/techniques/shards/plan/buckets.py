"""Buckets: gradients of parameters that are summed over workers together, for each sum takes time to begin.

Backward is done first with what forward used last. Buckets are filled in that order, so that each is
complete, and its sum begun, while backward goes on; what is left for the last one is the least.
"""

from collections.abc import Iterable, Iterator

from stowplan.ir import Graph, Kind
from stowplan.techniques.shards.plan.propagation import forward_ops

MOST_BYTES = 25 * 2**20
"""Of one bucket that is not a single gradient: while it is summed, its gradients are there twice."""

LEAST_BYTES = 2**20  # below, a sum takes hardly less time
_LEAST_BUCKETS = 4  # of a small model as well, so that some are summed before backward ends


def buckets_of(
    graph: Graph, trained: Iterable[str] | None = None, most_bytes: int | None = None
) -> tuple[tuple[str, ...], ...]:
    """The trained parameters in the order of their first use, grouped; without `trained`, all that are.

    `most_bytes` limits a group that is not a single parameter.
    """
    names = dict.fromkeys(_trained(graph) if trained is None else trained)
    used = dict.fromkeys(name for op in forward_ops(graph) for name in op.reads() if name in names)
    order = [*(name for name in names if name not in used), *used]
    return tuple(reversed([tuple(reversed(bucket)) for bucket in _filled(graph, order[::-1], most_bytes)]))


def _filled(graph: Graph, names: list[str], most_bytes: int | None) -> Iterator[list[str]]:
    """One after the other, each with gradients of one element type up to the limit."""
    sizes = {name: graph.tensors[name].nbytes or 0 for name in names}
    limit = most_bytes or min(MOST_BYTES, max(LEAST_BYTES, sum(sizes.values()) // _LEAST_BUCKETS))
    bucket: list[str] = []
    for name in names:
        is_full = sum(sizes[known] for known in bucket) + sizes[name] > limit
        if bucket and (is_full or graph.tensors[name].dtype != graph.tensors[bucket[0]].dtype):
            yield bucket
            bucket = []
        bucket.append(name)
    if bucket:
        yield bucket


def _trained(graph: Graph) -> list[str]:
    wanted = {tensor.gradient_of for tensor in graph.tensors.values()}
    return [name for name, t in graph.tensors.items() if t.kind is Kind.PARAMETER and name in wanted]
