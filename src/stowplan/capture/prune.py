"""Leaving out what nobody reads: eager computes it, but neither results nor gradients depend on it."""

from dataclasses import replace

import torch

from stowplan.capture.attributes import inputs_of
from stowplan.capture.program import Ref
from stowplan.capture.pure import Pure, PureCall
from stowplan.ops.aten import RANDOM


def pruned(pure: Pure) -> Pure:
    """Only the calls that something depends on. Random ones all stay: they move the generator on."""
    needed = {leaf.tensor for leaf in pure.outputs if isinstance(leaf, Ref)}
    needed |= {*pure.gradients.values(), *pure.updates.values()}
    kept = []
    for call in reversed(pure.calls):
        if is_random(call) or any(output in needed for output in call.call.outputs):
            needed.update(inputs_of(call.call))
            kept.append(call)
    return replace(pure, calls=tuple(reversed(kept)))


def is_random(call: PureCall) -> bool:
    """Whether the call may draw random numbers, by what PyTorch says of its op, which forgets a few."""
    target = call.call.target
    return torch.Tag.nondeterministic_seeded in target.tags or str(target) in RANDOM
