"""Record: what a run of a plan measured, beside what the plan had projected."""

from dataclasses import dataclass

from stowplan.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a gradient, buffer or result is from eager's.

    `allowed` is the difference that rounding explains if the plan changes the order of sums, else zero.
    """

    tensor: str
    largest: float  # absolute difference over all elements
    scale: float  # the largest magnitude in eager's tensor
    allowed: float = 0.0

    @property
    def relative(self) -> float:
        return self.largest / self.scale if self.scale else self.largest


@dataclass(frozen=True, slots=True)
class Record:
    """One run. The curve has a value after each allocation and each free, with the time it happened.

    `measured_seconds` is a step's time without the measurement. The `plain_` figures are those of eager,
    measured on the same machine; they are None if eager was not run (it may not fit).
    """

    plan: Plan
    device: str
    measured_curve_bytes: tuple[int, ...]
    measured_curve_seconds: tuple[float, ...]
    measured_seconds: float
    plain_measured_peak_bytes: int | None = None
    plain_measured_seconds: float | None = None
    differences: tuple[Difference, ...] = ()

    @property
    def measured_peak_bytes(self) -> int:
        return max(self.measured_curve_bytes, default=0)

    @property
    def measured_time_ratio(self) -> float | None:
        """Measured seconds over those of eager, if eager was run."""
        return self.measured_seconds / self.plain_measured_seconds if self.plain_measured_seconds else None

    @property
    def worst(self) -> Difference | None:
        """The tensor that differs most for its scale."""
        return max(self.differences, key=lambda difference: difference.relative, default=None)

    @property
    def holds(self) -> bool:
        """Whether the budget held and no tensor differs from eager's by more than the plan allows."""
        within = self.measured_peak_bytes <= self.plan.allowed_bytes
        return within and all(difference.largest <= difference.allowed for difference in self.differences)
