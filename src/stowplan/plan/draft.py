"""Draft: a graph, a budget, the decisions and steps, and figures that show that they fit.

Whatever makes or changes a schedule works on a draft. `verify` makes the plan of a draft, at the end of each
road to one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from stowplan.ir import Graph, Op
from stowplan.ops.effects import FUSED, RELAID
from stowplan.plan.judge.simulate import peaks_by_device
from stowplan.plan.pricing import Pricing
from stowplan.plan.steps import Decision, Step
from stowplan.units import format_bytes

if TYPE_CHECKING:
    from stowplan.plan.tile_map import TileMap


class Exactness(StrEnum):
    """How near the gradients of a planned step are to those of the plain one."""

    BITWISE = "bitwise"
    ROUNDING = "within rounding"  # by tiles or compiled kernels, or because eager runs other ops
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


@dataclass(frozen=True, slots=True)
class ArenaUse:
    """What a step takes that runs in an arena: `nbytes` of it, and the most that lies beside it at once.

    `copied_bytes` are those of all results that are copied into the arena.
    """

    nbytes: int
    beside_bytes: int
    copied_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The arena exists from the beginning of forward to the end of backward."""
        return self.nbytes + self.beside_bytes


@dataclass(frozen=True, slots=True, repr=False)
class Schedule:
    """Steps for one budget, with their figures: what a `Draft` and a `Plan` have in common.

    Bytes count everything alive during the step except constants. `decisions` has an entry for the owner of
    each storage of the forward half that backward needs, or that is recomputed for it. With tiles, `graph`
    has sweeps in place of segments, `tile_maps` describes them, and `decisions` also has the tensors inside.
    The projected curve counts what tensors request; with an `arena` the step takes what that says.
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
    tile_maps: "tuple[TileMap, ...]" = ()
    cut_short: str = ""  # what ended the search early, if anything did
    against_eager: AgainstEager | None = None  # None: the plan is of a graph without a model
    projected_for: str = ""  # the card that the step was captured and priced for, if it is another device
    arena: ArenaUse | None = None

    def __repr__(self) -> str:
        """Its figures in one line; the steps are thousands."""
        budget, peak = format_bytes(self.allowed_bytes), format_bytes(self.projected_peak_bytes)
        cut = f"; the search was ended by {self.cut_short}, gap {self.gap:.1%}" if self.cut_short else ""
        there = f", projected for {self.projected_for}" if self.projected_for else ""
        return (
            f"<{type(self).__name__} for {budget}: peak {peak}, {self.time_ratio:.3f} x eager's time,"
            f" {self.exactness}{there}{cut}>"
        )

    @property
    def is_tiled(self) -> bool:
        """Whether it computes anything tile by tile."""
        return bool(self.tile_maps)

    @property
    def kernels(self) -> tuple[Op, ...]:
        """Groups of ops that compiled kernels compute; `exact` are those seen to give eager's bits."""
        return tuple(op for op in self.graph.ops if op.type == FUSED)

    @property
    def relaid(self) -> tuple[Op, ...]:
        """Ops that run on another layout than the user's."""
        return tuple(op for op in self.graph.ops if op.attributes.get(RELAID))

    @property
    def exactness(self) -> Exactness:
        """Whether its gradients equal eager's bit for bit, by its decisions and the captured ops."""
        verdict = self.against_eager.verdict if self.against_eager else Verdict.SAME
        rounding = any(op.attributes.get("exact") is not True for op in self.kernels)
        if self.is_tiled or verdict is Verdict.DIFFERS or rounding or self.relaid:
            return Exactness.ROUNDING
        return Exactness.UNCHECKED if verdict is Verdict.UNCHECKED else Exactness.BITWISE

    @property
    def has_backward(self) -> bool:
        """Whether there is a backward half, for which values can be kept or recomputed."""
        return self.graph.has_backward

    @property
    def projected_peak_bytes(self) -> int:
        return self.arena.peak_bytes if self.arena else self.requested_peak_bytes

    @property
    def requested_peak_bytes(self) -> int:
        """The most that tensors and workspace request at once."""
        return max(self.projected_curve_bytes, default=0)

    @property
    def peaks_by_device(self) -> dict[str, int]:
        """The most that tensors and workspace request at once on each device of the step."""
        return peaks_by_device(self.graph, self.steps, self.pricing)

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


@dataclass(frozen=True, slots=True, repr=False)
class Draft(Schedule):
    """A schedule that is being made: changed by `replace`, and a plan once `verify` finds it legal."""
