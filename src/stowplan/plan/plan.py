"""Plan: a graph, a budget, what was decided and why it fits. Frozen; made by `make_plan`."""

from collections.abc import Mapping
from dataclasses import dataclass

from stowplan.ir import Graph
from stowplan.plan.decision import Decision, Step
from stowplan.plan.pricing import Pricing


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule for one budget.

    Bytes count everything alive during the step but constants. `decisions` are by the tensor that owns a
    storage, for all forward tensors that the backward half needs or that are made again for it.
    """

    graph: Graph
    pricing: Pricing
    allowed_bytes: int
    decisions: Mapping[str, Decision]
    steps: tuple[Step, ...]
    projected_curve_bytes: tuple[int, ...]
    projected_seconds: float
    plain_peak_bytes: int
    plain_seconds: float
    minimum_bytes: int  # the smallest budget for which a plan was found
    bound_seconds: float  # no schedule in this order is faster within the budget
    extra_macs: int

    @property
    def projected_peak_bytes(self) -> int:
        return max(self.projected_curve_bytes, default=0)

    @property
    def time_ratio(self) -> float:
        """Projected seconds over those of the plain step."""
        return self.projected_seconds / self.plain_seconds if self.plain_seconds else 1.0

    @property
    def bound(self) -> float:
        """The lower bound on `time_ratio`."""
        return self.bound_seconds / self.plain_seconds if self.plain_seconds else 1.0

    @property
    def gap(self) -> float:
        """How far `time_ratio` may be from the best, as a share of it."""
        return self.time_ratio / self.bound - 1.0 if self.bound else 0.0
