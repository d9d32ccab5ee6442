"""Document: the content of one file (graph, times, addresses, regions, tiles, heap) and notes on it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from stowplan.geometry import Rect
from stowplan.ir.graph import Graph
from stowplan.ir.heap import HeapTrace


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


class Reserved(NamedTuple):
    """Memory that an allocator had from the device, from the op at position `first` to that at `last`."""

    address: int
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """The places of tensors: (address, bytes) by tensor id, and the allocator's segments, if known."""

    places: Mapping[str, tuple[int, int]]
    segments: tuple[Reserved, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorRegion:
    """The part of a tensor one worker reads and the part it writes; None where it never writes."""

    read: Rect | None
    write: Rect | None


@dataclass(frozen=True, slots=True)
class RegionLists:
    """Per tensor what a worker reads and writes, per op the rect of each port ("result", "input", ...)."""

    tensors: Mapping[str, TensorRegion]
    ops: Mapping[str, Mapping[str, Rect]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TileStep:
    """One op of one tile: the region it makes, the region it reads for that, and the part inside the tensor.

    Forward makes a part of the op's output from its input; backward a part of the gradient of its input from
    the gradient of its output. `wanted` is not clipped: the part outside the tensor is padding.
    """

    op: str
    result: Rect
    wanted: Rect
    inside: Rect


@dataclass(frozen=True, slots=True)
class TileSchedule:
    """A segment computed tile by tile: for each tile (by grid coordinate) its forward and backward steps.

    Steps are in the order in which their regions are derived: forward from the last op to the first, backward
    from the first to the last. Tiles are in the order in which they run.
    """

    grid: tuple[int, ...]
    forward: Mapping[tuple[int, ...], tuple[TileStep, ...]]
    backward: Mapping[tuple[int, ...], tuple[TileStep, ...]]


class NoteKind(StrEnum):
    """The reason for a note of a reader."""

    INFERRED = "inferred"  # not written in the file, deduced
    REPAIRED = "repaired"  # written wrongly, corrected
    ODD = "odd"  # written strangely, kept as it is
    CHANGED = "changed"  # not as in the file, because the user asked for it


@dataclass(frozen=True, slots=True)
class Note:
    """One remark of a reader, with its line or key."""

    kind: NoteKind
    where: str
    what: str


@dataclass(frozen=True, slots=True)
class Document:
    """What a reader returns. `counts` are the figures of the file itself (rows, edges, boxes) by name."""

    format: str
    graph: Graph
    profile: Profile | None = None
    allocation: Allocation | None = None
    regions: RegionLists | None = None
    tiles: TileSchedule | None = None
    notes: tuple[Note, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    heap: HeapTrace | None = None
