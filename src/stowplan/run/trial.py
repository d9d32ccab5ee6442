"""A trial: one op, run by itself on operands made for it, shows what it costs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stowplan.run.machine import free_bytes
from stowplan.run.measure import measure
from stowplan.run.operands import call_on, operands_of
from stowplan.run.probe_cache import Cost
from stowplan.run.signature import Signature
from stowplan.run.timing import median_seconds, seconds_of

OP_LIMIT_SECONDS = 0.1  # an op that takes longer is run twice in all
_ROOM = 4  # results and workspace may be larger than the operands: so many times their bytes must be free


def cost_of(signature: Signature, device: torch.device, *, repeats: int) -> Cost | None:
    """None if the op refuses the operands made for it, or if there is no room to try it."""
    if _ROOM * signature.operand_bytes > free_bytes(device):
        return None
    with _undisturbed(device):
        try:
            return _tried(signature, device, repeats)
        except (RuntimeError, ValueError, IndexError):
            return None


def _tried(signature: Signature, device: torch.device, repeats: int) -> Cost:
    operands = operands_of(signature)
    run = call_on(signature, operands)
    seconds = median_seconds(run, device, repeats=repeats, limit_seconds=OP_LIMIT_SECONDS)
    # Memory comes last, for a first call also builds what kernels keep; a slow op is timed here again, warm.
    measured = measure(lambda: seconds_of(run, device), device=device, before=operands)
    return Cost(min(seconds, measured.result), measured.measured_rise_bytes)


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Random ops draw from copies of the generators; no backward is recorded, nothing is cast on the way."""
    accelerators = [] if device.type == "cpu" else [device]
    with (
        torch.random.fork_rng(accelerators, device_type=device.type if accelerators else "cuda"),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield
