"""Decision: the closed set of answers to "how long does this tensor live". Step: what a plan does in turn."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Keep:
    """Lives from its producer to its last reader."""


@dataclass(frozen=True, slots=True)
class Recompute:
    """Dropped after its last forward reader and made again late.

    `hold`: made once before the first backward reader and held to the last; otherwise made for each reader.
    """

    hold: bool


@dataclass(frozen=True, slots=True)
class Offload:
    """Moved to a tier while nobody reads it, and back before its next reader."""

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
    """Run a forward op once more, for the outputs named; its other outputs are discarded at once."""

    op: str
    outputs: tuple[str, ...]
    overwrites: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Free:
    """Let go of tensors; a storage is freed with the last tensor in it."""

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

    The next op that uses one of them waits until all is read. What was stored can be loaded many times.
    """

    tensors: tuple[str, ...]


Step: TypeAlias = Compute | RecomputeOp | Free | Store | Load
