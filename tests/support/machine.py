"""A machine that is the same everywhere, so that a seed means the same case on every computer and every day.

Plans depend on seconds, and seconds on the day. Here an op's price is a number drawn from its signature; its
memory is measured as ever. A spill file with small chunks makes transfers pay on tensors of a few kilobytes.
Probes are remembered in memory, plans only for as long as one case; searches are short.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from unittest.mock import patch

import torch

from stowplan.plan.pricing import Machine, Tier
from stowplan.run.cost.machine import Cost, Findings, Platform, ProbeCache, Rates
from stowplan.run.cost.probe import Signature, cost_of_call
from stowplan.techniques.offload.run.disk import DiskTier

_UNIT_SECONDS = 1e-4
_ANCHORS = (
    2  # starts of a search, each of which solves programs in whole numbers: most of the time of a small one
)
_CHUNK_BYTES = 4096
_RATE = 1e12  # bytes per second: a transfer costs less than any op


class _SmallTier(DiskTier):
    """A spill file that is fast and needs little staging."""

    def described(self) -> Tier:
        return Tier("disk", 2**30, _RATE, _RATE, 0.0, staging_bytes=self.staging_bytes)


class _Remembered:
    """Stands in for the files of `ProbeCache`, which grow too long to be read before every case."""

    def __init__(self) -> None:
        self._known: dict[Platform, Findings] = {}

    def read(self, _cache: ProbeCache, platform: Platform) -> Findings:
        return self._known.setdefault(platform, Findings(platform))

    def add(
        self,
        cache: ProbeCache,
        platform: Platform,
        costs: Mapping[str, Cost],
        machine: Machine | None = None,
        tiers: Mapping[str, Rates] = MappingProxyType({}),
    ) -> None:
        known = self.read(cache, platform)
        known.costs.update(costs)
        known.tiers.update(tiers)
        if machine is not None:
            self._known[platform] = Findings(platform, known.costs, machine, known.tiers)


@contextmanager
def same_everywhere() -> Iterator[None]:
    """Runs with fixed prices and a folder of its own."""
    remembered = _Remembered()
    with tempfile.TemporaryDirectory(prefix="stowplan-hunt-") as folder, ExitStack() as stack:
        for target, instead in (
            ("stowplan.run.cost.probe.cost_of_call", _drawn_cost),
            ("stowplan.run.cost.probe.measure_machine", lambda *_, **__: Machine()),
            ("stowplan.run.planning.planner.tier_for", _tier),
            ("stowplan.run.step.straight.tier_for", _tier),
            ("stowplan.plan.frontier._ANCHORS", _ANCHORS),
            ("stowplan.run.cost.machine.ProbeCache.read", lambda *args: remembered.read(*args)),
            (
                "stowplan.run.cost.machine.ProbeCache.add",
                lambda *args, **more: remembered.add(*args, **more),
            ),
        ):
            stack.enter_context(patch(target, instead))
        stack.enter_context(patch.dict(os.environ, {"XDG_CACHE_HOME": folder}))
        yield


def forget_plans() -> None:
    """Empty the cache of plans, so that a case never finds what another has left."""
    shutil.rmtree(Path(os.environ["XDG_CACHE_HOME"], "stowplan", "plans"), ignore_errors=True)


def _drawn_cost(signature: Signature, device: torch.device, **_: object) -> Cost | None:
    measured = cost_of_call(signature, device, repeats=1)
    return Cost(_price(signature.text), measured.rise_bytes) if measured else None


def _price(text: str) -> float:
    return _UNIT_SECONDS * (1 + sha256(text.encode()).digest()[0])


@cache
def _tier(_device: torch.device) -> DiskTier:
    return _SmallTier(Path(tempfile.gettempdir()), chunk_bytes=_CHUNK_BYTES)
