"""What an observed process writes down, as one JSON file, and the first process shows."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

PARAMETERS, BUFFERS, GRADIENTS = "parameters", "buffers", "gradients"
STATE, INPUTS, ACTIVATIONS = "optimizer state", "inputs", "activations"
TEMPORARIES, EVALUATION, OTHER = "temporaries", "evaluation", "other tensors"
KERNELS = "inside kernels"
LASTING = (PARAMETERS, BUFFERS, GRADIENTS, STATE)
"""Kinds that belong to training itself, whatever a plan does."""


@dataclass(frozen=True, slots=True)
class PeakShare:
    """Bytes of one kind, or the most in one phase."""

    what: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class CodePlace:
    """Bytes of one kind that one line and module allocated; `op` allocated the largest of them."""

    kind: str
    file: str
    line: int
    module: str
    op: str
    nbytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Alive:
    """All that is alive at one moment, and the phase of the loop."""

    nbytes: int
    phase: str
    kinds: list[PeakShare]
    places: list[CodePlace]
    module: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True)
class Remedy:
    """What can be had without a plan: why, its line, its bytes, and the peak without it if that is known."""

    what: str
    where: str
    advice: str
    nbytes: int
    peak_without_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """How the script ran out of memory, and what was alive then."""

    error: str
    message: str
    op: str
    alive: Alive


@dataclass(slots=True)
class WatchRecord:
    """One observed process.

    `told` says how far observing came, in a sentence, if there is no iteration. `loop` describes one
    iteration of `period` segments, each of which ends with an optimizer's step. `first` is the number of the
    first segment of the two observed iterations, 1 being the script's first.
    `so_far` is what is alive while the first iterations run, and None after them.
    `growth` lists what was allocated in the first of them and is alive after the second.
    """

    script: str = ""
    rank: str = ""
    torch: str = ""
    told: str = ""
    loop: str = ""
    period: int = 0
    segments: list[str] = field(default_factory=list)
    first: int = 0
    evaluations: int = 0
    peaks: list[int] = field(default_factory=list)
    peak: Alive | None = None
    phases: list[PeakShare] = field(default_factory=list)
    growth_bytes: int = 0
    growth: list[CodePlace] = field(default_factory=list)
    findings: list[Remedy] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failure: Failure | None = None
    so_far: Alive | None = None
    resident_bytes: int = 0

    def write(self, folder: str) -> None:
        """Write it whole, or leave the last one."""
        _write(asdict(self), self.rank, folder)


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """One plan of a module. `shapes` are those of the tensors that the call was given."""

    shapes: str
    eager_peak_bytes: int
    projected_peak_bytes: int
    time_ratio: float
    exactness: str


@dataclass(slots=True)
class ModuleFigures:
    """One module that a script trains. `beside_bytes` of the budget were kept for all that is not its step.

    `refusals` say what is not planned, and why.
    """

    name: str
    beside_bytes: int = 0
    plans: list[PlanFigures] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


@dataclass(slots=True)
class RunRecord:
    """One process of a script that ran under a budget.

    `peaks` are the most bytes of tensors in each measured iteration, and `step_peaks` those within the steps
    of optimizers alone. `notes` are the sentences that were said meanwhile. `told` is why nothing was done.
    """

    script: str = ""
    rank: str = ""
    budget_bytes: int = 0
    told: str = ""
    modules: list[ModuleFigures] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    step_peaks: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def write(self, folder: str) -> None:
        """Write it whole, or leave the last one."""
        _write(asdict(self), self.rank, folder)


def _write(record: dict[str, object], rank: str, folder: str) -> None:
    path = Path(folder, f"record-{rank or '0'}-{os.getpid()}.json")
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(record), encoding="utf-8")
    beside.replace(path)


Record = TypeVar("Record", WatchRecord, RunRecord)


def records_in(folder: str, kind: type[Record]) -> Iterator[Record]:
    """The records of a folder, by rank."""
    import msgspec  # the observed process does without

    def order(path: Path) -> tuple[int, str]:
        rank = path.name.split("-")[1]
        return (int(rank) if rank.isdecimal() else 0, path.name)

    for path in sorted(Path(folder).glob("record-*.json"), key=order):
        yield msgspec.json.decode(path.read_bytes(), type=kind)
