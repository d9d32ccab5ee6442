"""Plan: a graph, a budget, the decisions and the proof that it fits. Frozen; made by a `Planner`.

A decision is one of a closed set of answers to "how long does this tensor live". A step is one action.
Pricing says what each op and each transfer costs, and on what that figure rests.

A tier is where tensors can wait outside of the device's memory. It has two copy engines, one each way, that
take transfers in the order they were begun and work beside the ops. A transfer occupies the device's memory
from its beginning to its end.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from stowplan.errors import BadUse
from stowplan.ir import Graph, Op, Phase
from stowplan.ops.effects import FUSED, RELAID
from stowplan.units import format_bytes

if TYPE_CHECKING:
    from stowplan.plan.tile_map import TileMap


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


@dataclass(frozen=True, slots=True)
class Keep:
    """Lives from its producer to its last reader."""


@dataclass(frozen=True, slots=True)
class Recompute:
    """Freed after its last forward reader and recomputed in backward.

    `hold`: recomputed once, before the first backward reader, and kept to the last; otherwise for each
    reader.
    """

    hold: bool


@dataclass(frozen=True, slots=True)
class Offload:
    """Stored in a tier while no op reads it, and loaded back before its next reader."""

    tier: str


@dataclass(frozen=True, slots=True)
class Tile:
    """Never whole: its segment is computed rectangle by rectangle, `parts[i]` pieces along dim i."""

    segment: str
    parts: tuple[int, ...]


Decision: TypeAlias = Keep | Recompute | Offload | Tile


@dataclass(frozen=True, slots=True)
class Compute:
    """Run an op for the first time. `overwrites` pairs an output with the dying input it replaces."""

    op: str
    overwrites: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class RecomputeOp:
    """Run a forward op a second time, for the outputs named; its other outputs are discarded at once."""

    op: str
    outputs: tuple[str, ...]
    overwrites: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Free:
    """Free tensors; a storage is freed with the last tensor in it."""

    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """Begin to write a storage, all of whose names are `tensors`, to the tier.

    It stays in memory until its names are freed, and the Free waits until all is written.
    """

    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Begin to read a storage back into new memory, under the names it was stored by.

    The next op that uses one of them waits until all is read. A stored storage can be loaded many times.
    """

    tensors: tuple[str, ...]


def transfer_id(step: Store | Load) -> str:
    """The op that represents a transfer; it runs as often as its tensor is stored, or loaded."""
    return f"{'store' if isinstance(step, Store) else 'load'} {step.tensors[0]}"


Step: TypeAlias = Compute | RecomputeOp | Free | Store | Load


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
class Plan:
    """A schedule for one budget, with the figures that show that it fits.

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
        return any(op.phase is Phase.BACKWARD for op in self.graph.ops)

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
        from stowplan.plan.judge.simulate import peaks_by_device  # which knows steps of plans

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
