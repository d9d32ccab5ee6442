"""How fast a tier is: measured once by moving bytes through it, and kept beside what the probe found."""

from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from stowplan.plan.pricing import Tier
from stowplan.run.cost.machine import USER_CACHE, platform_of
from stowplan.run.cost.probe_cache import ProbeCache

if TYPE_CHECKING:
    from stowplan.run.offload.disk import DiskTier

_MOVED_BYTES = 2**25
_REPEATS = 5


def rates_of(tier: "DiskTier", cache: ProbeCache | None = USER_CACHE) -> Tier:
    """The disk tier as planners see it."""
    spill, place = tier.spill, platform_of(torch.device("cpu"))
    key = f"{spill.folder.stat().st_dev} {'direct' if spill.is_direct else 'cached'} {tier.chunk_bytes}"
    rates = cache.read(place).tiers.get(key) if cache else None
    if rates is None:
        rates = _measured(tier)
        if cache:
            cache.add(place, {}, tiers={key: rates})
    return Tier("disk", tier.capacity_bytes, *rates, staging_bytes=tier.staging_bytes)


def _measured(tier: "DiskTier") -> tuple[float, float, float]:
    """Bytes per second out and back, and the seconds that the smallest transfer takes."""
    large, small = (torch.zeros(nbytes, dtype=torch.uint8) for nbytes in (_MOVED_BYTES, 1))
    out, back = _both_ways(tier, large)
    latency = sum(_both_ways(tier, small)) / 2
    return _MOVED_BYTES / max(out - latency, 1e-9), _MOVED_BYTES / max(back - latency, 1e-9), latency


def _both_ways(tier: "DiskTier", data: torch.Tensor) -> tuple[float, float]:
    """Median seconds to store and to load; the first round, which makes room, does not count."""
    rounds = [_one_round(tier, data) for _ in range(_REPEATS + 1)][1:]
    return median(out for out, _ in rounds), median(back for _, back in rounds)


def _one_round(tier: "DiskTier", data: torch.Tensor) -> tuple[float, float]:
    started = perf_counter()
    away = tier.store(data)
    away.wait()
    stored = perf_counter()
    loaded = away.load()
    away.wait()
    del loaded
    return stored - started, perf_counter() - stored
