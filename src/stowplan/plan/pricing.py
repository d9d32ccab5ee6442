"""Pricing: what each op and each transfer costs, and on what that figure rests.

A tier is where tensors can wait outside of the device's memory. It has two copy engines, one each way, that
take transfers in the order they were begun and work beside the ops. A transfer occupies the device's memory
from its beginning to its end.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


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
