"""Agreement: what every worker has planned for itself holds for all of them, or for none.

A worker whose part does not fit must not leave the others waiting for its first message.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

from stowplan.errors import BadUse, BudgetTooSmall
from stowplan.run.shards.workers import Workers
from stowplan.units import format_bytes

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
