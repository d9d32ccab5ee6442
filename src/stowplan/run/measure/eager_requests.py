"""The requests of an eager step, from the storages that were seen while it was captured."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from stowplan.analyse.facts import is_resident
from stowplan.capture import Captured
from stowplan.ir import Kind, Phase
from stowplan.ops.cublas import is_product
from stowplan.ops.cuda_workspace import Workspace, peak_of
from stowplan.plan.allocator.requests import MemoryRequest, RequestLifetime, Requests, requests_of_lifetimes


def requests_of_eager(
    captured: Captured, workspaces: Mapping[str, Workspace], kept_by_products: Sequence[int] = ()
) -> Requests:
    """What eager allocates and frees, op by op; `workspaces` are what each op's kernels ask for.

    `kept_by_products` are the workspaces that cuBLAS keeps from the first product of forward's thread and of
    backward's on.
    """
    graph = captured.graph
    held = {name for name in graph.held if graph.tensors[name].kind is Kind.INPUT}
    standing = held | {tensor.id for tensor in graph.tensors.values() if is_resident(tensor)}
    spans = sorted(captured.eager.spans, key=lambda span: (span.first, _rank(span.tensor)))
    lifetimes = [
        RequestLifetime(span.nbytes, span.first, span.last, span.tensor in standing) for span in spans
    ]
    of_events = [
        max((workspaces.get(op, ()) for op in ops), key=peak_of, default=()) for ops in captured.eager.ops
    ]
    requests = requests_of_lifetimes(lifetimes, of_events)
    fresh = 1 + max((request.block for request in (*requests.before, *requests.iteration)), default=0)
    events = dict(zip(_first_products(captured), kept_by_products, strict=False))
    once = (
        (requests.end_of(event), MemoryRequest(fresh + number, nbytes))
        for number, (event, nbytes) in enumerate(events.items())
    )
    rest = kept_by_products[len(events) :]
    before = (MemoryRequest(-1 - number, nbytes) for number, nbytes in enumerate(rest))
    return replace(requests, once=tuple(once), before=(*requests.before, *before))


def _rank(tensor: str) -> int:
    """The place of a result among those of its op; dropout allocates its mask before its result."""
    op, _, number = tensor.rpartition(".")
    is_dropout = op.startswith("native_dropout") and "backward" not in op
    return -int(number) if is_dropout and number.isdigit() else 0


def _first_products(captured: Captured) -> Iterator[int]:
    """The events of the first product of matrices in forward and in backward."""
    event_of = {op: event for event, ops in enumerate(captured.eager.ops) for op in ops}
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        ops = (op for op in captured.graph.ops if op.phase is phase and is_product(op) and op.id in event_of)
        if first := next(ops, None):
            yield event_of[first.id]
