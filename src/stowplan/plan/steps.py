"""Decisions and steps: what a schedule is made of.

A decision is one of a closed set of answers to "how long does this tensor live". A step is one action.
"""

from dataclasses import dataclass
from typing import TypeAlias


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
