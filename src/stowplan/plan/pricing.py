"""Pricing: what each op and each transfer costs, and on what that figure rests.

A tier is where tensors can wait outside of the device's memory. It has two copy engines, one each way, that
take transfers in the order they were begun and work beside the ops. A transfer occupies the device's memory
from its beginning to its end.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from stowplan.analyse.facts import costs_of
from stowplan.errors import BadUse
from stowplan.ir import Graph, Profile


@dataclass(frozen=True, slots=True)
class Tier:
    """The properties of a tier that planning needs. Rates and latency are measured where the step runs.

    `staging_bytes` is what the engines themselves take of the device's memory in a step that uses them.
    """

    name: str
    capacity_bytes: int
    store_bytes_per_second: float
    load_bytes_per_second: float
    latency_seconds: float = 0.0
    staging_bytes: int = 0

    def store_seconds(self, nbytes: int) -> float:
        """How long the engine is busy writing `nbytes`."""
        return self.latency_seconds + nbytes / self.store_bytes_per_second

    def load_seconds(self, nbytes: int) -> float:
        """How long the engine is busy reading `nbytes`."""
        return self.latency_seconds + nbytes / self.load_bytes_per_second


_BYTES_PER_MAC = 1000  # moving bytes only breaks ties where multiply-accumulates are what counts


class Basis(StrEnum):
    """Where seconds come from."""

    MEASURED = "measured"  # ops were timed on a machine
    ROOFLINE = "roofline"  # a model of a machine: the slower of arithmetic and memory traffic
    MACS = "macs"  # one multiply-accumulate is one second: only ratios mean anything


@dataclass(frozen=True, slots=True)
class Pricing:
    """Seconds and kernel workspace by op id; and the tier, if there is one that tensors may be moved to."""

    seconds: Mapping[str, float]
    basis: Basis
    workspace_bytes: Mapping[str, int] = field(default_factory=dict)
    tier: Tier | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """A roofline: multiply-accumulates and bytes per second, and what starting an op takes."""

    macs_per_second: float = 2e10
    bytes_per_second: float = 1e10
    launch_seconds: float = 2e-6


def price_by_macs(graph: Graph) -> Pricing:
    """For graphs of unknown machines: arithmetic is what counts, traffic breaks ties."""
    costs = costs_of(graph)
    seconds = costs.macs + costs.traffic_bytes / _BYTES_PER_MAC
    return Pricing({op.id: float(s) for op, s in zip(graph.ops, seconds, strict=True)}, Basis.MACS)


def price_by_roofline(graph: Graph, machine: Machine) -> Pricing:
    """An estimate where nothing may run: the slower of arithmetic and traffic, op by op."""
    costs = costs_of(graph)
    seconds = {
        op.id: machine.launch_seconds
        + max(float(macs) / machine.macs_per_second, float(traffic) / machine.bytes_per_second)
        for op, macs, traffic in zip(graph.ops, costs.macs, costs.traffic_bytes, strict=True)
    }
    return Pricing(seconds, Basis.ROOFLINE)


def price_by_profile(graph: Graph, profile: Profile, workspace_bytes: Mapping[str, int]) -> Pricing:
    """Seconds of the profile's only or its device clock."""
    name = "device" if "device" in profile.clocks else next(iter(profile.clocks), "")
    clock = profile.clocks.get(name, {})
    missing = [op.id for op in graph.ops if op.id not in clock]
    if missing:
        raise BadUse(f"the profile has no time for {len(missing)} ops, the first is {missing[0]!r}")
    seconds = {op.id: clock[op.id].end_seconds - clock[op.id].kernel_seconds for op in graph.ops}
    if reversed_ops := [name for name, took in seconds.items() if took < 0]:
        raise BadUse(f"the profile lets op {reversed_ops[0]!r} end before its kernel begins")
    basis = Basis.ROOFLINE if profile.estimated else Basis.MEASURED
    return Pricing(seconds, basis, workspace_bytes)
