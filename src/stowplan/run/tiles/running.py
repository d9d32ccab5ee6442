"""Running statistics of the norms in a sweep: updated outside of it, once a step, however often it runs."""

from collections.abc import Mapping

import torch
from torch import Tensor

from stowplan.capture import Call, Ref
from stowplan.run.tiles.gathering import Gathering
from stowplan.run.tiles.sweep import Sweep

_WITH_BUFFERS = torch.ops.aten._native_batch_norm_legit_functional.default


def running_statistics(
    sweep: Sweep, calls: Mapping[str, Call], statistics: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The new contents of buffers, by the names that the norms' own outputs have for them."""
    found: dict[str, Tensor] = {}
    for op, gathering in sweep.gatherings.items():
        if calls[op].target is _WITH_BUFFERS:
            found |= _updated(calls[op], gathering, statistics, values)
    return found


def _updated(
    call: Call, gathering: Gathering, statistics: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    given = call.arguments()
    momentum, count = given["momentum"], gathering.count
    assert isinstance(momentum, float)
    mean, variance = (statistics[name] for name in gathering.read)
    fresh = (mean, variance * (count / max(1, count - 1)))
    pairs = zip(call.outputs[-2:], ("running_mean", "running_var"), fresh, strict=True)
    updated = {}
    with torch.no_grad():
        for name, buffer, statistic in pairs:
            ref = given[buffer]
            assert isinstance(ref, Ref)
            assert name is not None
            before = values[ref.tensor]
            updated[name] = (before * (1 - momentum) + statistic * momentum).to(before.dtype)
    return updated
