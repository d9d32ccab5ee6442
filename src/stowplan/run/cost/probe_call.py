"""Probing one call: an op, or a part of one, runs alone on generated operands and shows its cost."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from stowplan.run.cost.fraction import fraction_of
from stowplan.run.cost.machine import free_bytes, least_seconds, seconds_of
from stowplan.run.cost.operands import call_on, operands_of
from stowplan.run.cost.probe_cache import Cost
from stowplan.run.cost.signature import Signature
from stowplan.run.measure.measure import measure

OP_LIMIT_SECONDS = 0.1  # an op that takes longer is run twice in all
_LONG_SECONDS = 2.0  # and one that takes longer than this once
_ROOM = 4  # this many times the operands' bytes must be free, because results and workspace may be larger


PROBES: dict[str, Callable[[Signature, torch.device], Cost | None]] = {}
"""By op type, the probes of ops that techniques add: running these whole would take too long."""


def cost_of_call(signature: Signature, device: torch.device, *, repeats: int) -> Cost | None:
    """The cost of a call; None if the op refuses the operands, or memory is too short to probe it."""
    if own := PROBES.get(str(signature.call.target)):
        return own(signature, device)
    fraction = fraction_of(signature)
    if fraction and (part := cost_of_call(fraction.signature, device, repeats=repeats)):
        return fraction.whole(part)
    if _ROOM * signature.operand_bytes > free_bytes(device):
        return None
    return probed_cost(signature, device, repeats=repeats)


def probed_cost(signature: Signature, device: torch.device, *, repeats: int) -> Cost | None:
    """The measured cost of a call; None if the op refuses the generated operands."""
    with _undisturbed(device):
        try:
            return _cost(signature, device, repeats)
        except (RuntimeError, ValueError, IndexError):
            return None


def _cost(signature: Signature, device: torch.device, repeats: int) -> Cost:
    operands = operands_of(signature)
    run = call_on(signature, operands)
    first = measure(lambda: seconds_of(run, device), device=device, before=operands)
    if first.result > _LONG_SECONDS:
        return Cost(first.result, first.measured_rise_bytes)
    seconds = first.result
    if seconds < OP_LIMIT_SECONDS:
        seconds = least_seconds(run, device, repeats=repeats, limit_seconds=OP_LIMIT_SECONDS)
    # Memory comes last, for a first call also builds what kernels keep; a slow op is timed here again, warm.
    last = measure(lambda: seconds_of(run, device), device=device, before=operands)
    return Cost(min(seconds, last.result), last.measured_rise_bytes)


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
