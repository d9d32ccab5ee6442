"""The requests of an eager step, from the storages that were seen while it was captured."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from stowplan.analyse.facts import is_resident
from stowplan.capture import Captured
from stowplan.ir import Kind, Phase
from stowplan.ops.cublas import is_product
from stowplan.plan.allocator.requests import MemoryRequest, RequestLifetime, Requests, requests_of_lifetimes


def requests_of_eager(
    captured: Captured, workspace_bytes: Mapping[str, int], kept_by_products: Sequence[int] = ()
) -> Requests:
    """What eager allocates and frees, op by op; `workspace_bytes` is that of each op's kernels.

    `kept_by_products` are the workspaces that cuBLAS keeps from the first product of forward's thread and of
    backward's on.
    """
    graph = captured.graph
    held = {name for name in graph.held if graph.tensors[name].kind is Kind.INPUT}
    standing = held | {tensor.id for tensor in graph.tensors.values() if is_resident(tensor)}
    lifetimes = [
        RequestLifetime(span.nbytes, span.first, span.last, span.tensor in standing)
        for span in captured.eager.spans
    ]
    requests = requests_of_lifetimes(lifetimes, captured.eager.workspace_of_events(workspace_bytes))
    events = dict(zip(_first_products(captured), kept_by_products, strict=False))
    once = (
        (requests.end_of(event), MemoryRequest(1 + len(lifetimes) + number, nbytes))
        for number, (event, nbytes) in enumerate(events.items())
    )
    rest = kept_by_products[len(events) :]
    before = (MemoryRequest(-1 - number, nbytes) for number, nbytes in enumerate(rest))
    return replace(requests, once=tuple(once), before=(*requests.before, *before))


def _first_products(captured: Captured) -> Iterator[int]:
    """The events of the first product of matrices in forward and in backward."""
    event_of = {op: event for event, ops in enumerate(captured.eager.ops) for op in ops}
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        ops = (op for op in captured.graph.ops if op.phase is phase and is_product(op) and op.id in event_of)
        if first := next(ops, None):
            yield event_of[first.id]
