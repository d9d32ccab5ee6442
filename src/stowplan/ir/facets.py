"""What a document may carry beside a graph: times, addresses, regions, a tile schedule."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stowplan.geometry import Rect


@dataclass(frozen=True, slots=True)
class Interval:
    """When an op was issued, when its kernel began and when it ended, in seconds of its clock."""

    start_seconds: float
    kernel_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured times by clock and op. Clocks have names because they need not be aligned.

    `estimated` marks times that come from a model of the machine, not from a run.
    """

    clocks: Mapping[str, Mapping[str, Interval]]
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class Allocation:
    """Where tensors sat: (address, bytes) by tensor id."""

    places: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class TensorRegion:
    """The part of a tensor one worker reads and the part it writes; None where it never writes."""

    read: Rect | None
    write: Rect | None


@dataclass(frozen=True, slots=True)
class Regions:
    """Per tensor what a worker reads and writes, per op the rect of each port ("result", "input", ...)."""

    tensors: Mapping[str, TensorRegion]
    ops: Mapping[str, Mapping[str, Rect]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TileStep:
    """One op of one tile: the input region it wants (unclipped) and what of it lies inside the tensor."""

    op: str
    wanted: Rect
    inside: Rect


@dataclass(frozen=True, slots=True)
class TileSchedule:
    """A segment computed tile by tile: for each tile (by grid coordinate) its forward and backward steps."""

    grid: tuple[int, ...]
    forward: Mapping[tuple[int, ...], tuple[TileStep, ...]]
    backward: Mapping[tuple[int, ...], tuple[TileStep, ...]]
