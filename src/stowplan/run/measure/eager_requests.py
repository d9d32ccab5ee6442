"""The requests of an eager step, from the storages that were seen while it was captured."""

from collections.abc import Mapping

from stowplan.analyse.facts import is_resident
from stowplan.capture import Captured
from stowplan.plan.allocator.requests import Lifetime, Requests, requests_of_lifetimes


def requests_of_eager(captured: Captured, workspace_bytes: Mapping[str, int]) -> Requests:
    """What eager allocates and frees, op by op; `workspace_bytes` is that of each op's kernels."""
    standing = {tensor.id for tensor in captured.graph.tensors.values() if is_resident(tensor)}
    lifetimes = (
        Lifetime(span.nbytes, span.first, span.last, span.tensor in standing) for span in captured.eager.spans
    )
    return requests_of_lifetimes(lifetimes, captured.eager.workspace_of_events(workspace_bytes))
