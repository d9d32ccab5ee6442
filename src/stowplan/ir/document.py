"""Document: everything one file said, and what its reader had to infer or repair to understand it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from stowplan.ir.facets import Allocation, Profile, Regions, TileSchedule
from stowplan.ir.graph import Graph


class NoteKind(StrEnum):
    """Why a reader has something to say."""

    INFERRED = "inferred"  # not written in the file, deduced
    REPAIRED = "repaired"  # written wrongly, corrected
    ODD = "odd"  # written strangely, kept as it is


@dataclass(frozen=True, slots=True)
class Note:
    """One remark of a reader, with the line or key it is about."""

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
    regions: Regions | None = None
    tiles: TileSchedule | None = None
    notes: tuple[Note, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
