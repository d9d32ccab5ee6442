"""Leaving out what nobody reads: eager computes it, but neither results nor gradients depend on it."""

from dataclasses import replace

import torch
from torch._ops import OpOverload

from stowplan.capture.attributes import inputs_of
from stowplan.capture.program import Ref
from stowplan.capture.pure import Pure
from stowplan.ops.aten import RANDOM


def pruned(pure: Pure) -> Pure:
    """Only the calls that something depends on. Random ones all stay: they move the generator on."""
    needed = {leaf.tensor for leaf in pure.outputs if isinstance(leaf, Ref)}
    needed |= {*pure.gradients.values(), *pure.updates.values()}
    kept = []
    for call in reversed(pure.calls):
        if draws(call.call.target) or any(output in needed for output in call.call.outputs):
            needed.update(inputs_of(call.call))
            kept.append(call)
    return replace(pure, calls=tuple(reversed(kept)))


def draws(target: OpOverload) -> bool:
    """Whether an op may draw random numbers, by what PyTorch says of it, which forgets a few."""
    return torch.Tag.nondeterministic_seeded in target.tags or str(target) in RANDOM
