"""Plan: a graph, a budget, the decisions and the proof that it fits. Frozen; made by a `Planner`."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from stowplan.errors import BadUse
from stowplan.ir import Graph, Phase
from stowplan.plan.decision import Decision, Step
from stowplan.plan.pricing import Pricing
from stowplan.plan.tile_map import TileMap
from stowplan.units import format_bytes


class Exactness(StrEnum):
    """How near the gradients of a planned step are to those of the plain one."""

    BITWISE = "bitwise"
    ROUNDING = "within rounding"  # sums in another order: by tiles, or because eager runs other ops
    UNCHECKED = "not checked against eager"


class Verdict(StrEnum):
    """The result of comparing the captured forward with an eager one, op by op."""

    SAME = "same ops"
    DIFFERS = "other ops"
    UNCHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class AgainstEager:
    """The verdict, with the first op that differs or the reason why nothing was compared."""

    verdict: Verdict
    note: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """A schedule for one budget, with the figures that show that it fits.

    Bytes count everything alive during the step except constants. `decisions` has an entry for the owner of
    each storage of the forward half that backward needs, or that is recomputed for it. With tiles, `graph`
    has sweeps in place of segments, `tile_maps` describes them, and `decisions` also has the tensors inside.
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
    minimum_bytes: int | None  # the smallest budget for which a plan was found; None: nobody searched
    bound_seconds: float  # no schedule in this order is faster within the budget
    extra_macs: int
    tile_maps: tuple[TileMap, ...] = ()
    cut_short: str = ""  # what ended the search early, if anything did
    against_eager: AgainstEager | None = None  # None: the plan is of a graph without a model
    projected_for: str = ""  # the card that the step was captured and priced for, if it is another device

    def __repr__(self) -> str:
        """Its figures in one line; the steps are thousands."""
        budget, peak = format_bytes(self.allowed_bytes), format_bytes(self.projected_peak_bytes)
        cut = f"; the search was ended by {self.cut_short}, gap {self.gap:.1%}" if self.cut_short else ""
        there = f", projected for {self.projected_for}" if self.projected_for else ""
        return (
            f"<Plan for {budget}: peak {peak}, {self.time_ratio:.3f} x eager's time,"
            f" {self.exactness}{there}{cut}>"
        )

    def _repr_html_(self) -> str:
        """The same figures as a small table, for notebooks."""
        rows = (
            ("budget", format_bytes(self.allowed_bytes)),
            ("projected peak", format_bytes(self.projected_peak_bytes)),
            ("peak without a plan", format_bytes(self.plain_peak_bytes)),
            ("time", f"{self.time_ratio:.3f} x eager"),
            ("gradients", str(self.exactness)),
            *((("device", f"{self.projected_for}, projected"),) if self.projected_for else ()),
        )
        return (
            f"<table>{''.join(f'<tr><th>{name}</th><td>{value}</td></tr>' for name, value in rows)}</table>"
        )

    def save(self, path: str | Path) -> None:
        """Write it to a file, from which `stowplan.load_plan` reads it."""
        from stowplan.plan.files import plan_file

        try:
            Path(path).write_text(plan_file.write(self), encoding="utf-8")
        except OSError as fault:
            raise BadUse(f"{path} cannot be written: {fault.strerror or fault}") from fault

    @property
    def is_tiled(self) -> bool:
        """Whether it computes anything tile by tile."""
        return bool(self.tile_maps)

    @property
    def exactness(self) -> Exactness:
        """Whether its gradients equal eager's bit for bit, by its decisions and the captured ops."""
        verdict = self.against_eager.verdict if self.against_eager else Verdict.SAME
        if self.is_tiled or verdict is Verdict.DIFFERS:
            return Exactness.ROUNDING
        return Exactness.UNCHECKED if verdict is Verdict.UNCHECKED else Exactness.BITWISE

    @property
    def has_backward(self) -> bool:
        """Whether there is a backward half, for which values can be kept or recomputed."""
        return any(op.phase is Phase.BACKWARD for op in self.graph.ops)

    @property
    def projected_peak_bytes(self) -> int:
        return max(self.projected_curve_bytes, default=0)

    @property
    def time_ratio(self) -> float:
        """Projected seconds over those of the baseline."""
        return self.projected_seconds / self.plain_seconds if self.plain_seconds else 1.0

    @property
    def bound(self) -> float:
        """The lower bound on `time_ratio`."""
        return self.bound_seconds / self.plain_seconds if self.plain_seconds else 1.0

    @property
    def gap(self) -> float:
        """How far `time_ratio` may be from the best, as a share of it."""
        return self.time_ratio / self.bound - 1.0 if self.bound else 0.0
