"""Tier: where tensors can wait outside of the device's memory, and how fast they come and go.

A tier has two copy engines, one each way, that take transfers in the order they were begun and work beside
the ops. A transfer occupies the device's memory from its beginning to its end.
"""

from dataclasses import dataclass


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
