"""A stream of allocations and frees as a graph: an op makes what is allocated in it, reads what is freed.

Ops are cut so that in each the allocations come before the frees. The graph's memory curve is then, op by op,
the most that the run had allocated.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stowplan.ir import Allocation, Graph, Interval, Kind, Note, NoteKind, Op, Phase, Profile, Tensor, Use

_AT_ONCE = Interval(0.0, 0.0, 0.0)
OPERANDS_UNKNOWN: Mapping[str, str] = {"operands": "unknown"}
"""Such an op has other operands than it tells: `ops.effects` has it run once only."""


@dataclass(frozen=True, slots=True)
class Work:
    """What the program was doing: an op's type, phase, place in the code, and when, in seconds."""

    type: str
    phase: Phase
    scope: str = ""
    source: str = ""
    interval: Interval = _AT_ONCE


@dataclass(slots=True)
class _Part:
    """A stretch of one work: first it allocates, then it frees."""

    work: Work
    made: list[str] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)


@dataclass(slots=True)
class AllocationHistory:
    """Told what happened in order, it becomes the graph, the addresses and the times of a run."""

    device: str
    _parts: list[_Part] = field(default_factory=list)
    _tensors: dict[str, Tensor] = field(default_factory=dict)
    _places: dict[str, tuple[int, int]] = field(default_factory=dict)
    _living: dict[int, str] = field(default_factory=dict)
    _times_at: dict[int, int] = field(default_factory=dict)
    _kept: set[str] = field(default_factory=set)
    _missing_frees: int = 0

    def enter(self, work: Work) -> None:
        """From now on this is what runs."""
        self._parts.append(_Part(work))

    def was_there(self, address: int, nbytes: int) -> None:
        """Memory taken before the first op, by whom is not known."""
        self._place(address, nbytes, Kind.INPUT)

    def had_besides(self, before_bytes: int) -> None:
        """Told at the end what was taken before in all: the rest of it, nobody gave back."""
        known = sum(tensor.nbytes or 0 for tensor in self._tensors.values() if tensor.kind is Kind.INPUT)
        if before_bytes > known:
            rest = Tensor("before", Kind.INPUT, nbytes=before_bytes - known, device=self.device)
            self._tensors[rest.id] = rest
            self._kept.add(rest.id)

    def allocate(self, address: int, nbytes: int) -> None:
        """The current work takes memory."""
        if address in self._living:
            self._missing_frees += 1
            self.free(address, nbytes)
        if self._parts[-1].freed:
            self.enter(continued(self._parts[-1].work))
        self._parts[-1].made.append(self._place(address, nbytes, Kind.ACTIVATION))

    def free(self, address: int, nbytes: int) -> None:
        """The current work gives memory back; what nobody took was there before."""
        if address not in self._living:
            self.was_there(address, nbytes)
        self._parts[-1].freed.append(self._living.pop(address))

    def _place(self, address: int, nbytes: int, kind: Kind) -> str:
        count = self._times_at.get(address, 0) + 1
        self._times_at[address] = count
        name = f"{address:#x}" + (f".{count}" if count > 1 else "")
        self._tensors[name] = Tensor(name, kind, nbytes=nbytes, device=self.device)
        self._places[name] = (address, nbytes)
        self._living[address] = name
        return name

    def graph(self) -> Graph:
        """An op for each part; what was never freed is held."""
        ops = tuple(_op(part, number, self.device) for number, part in enumerate(self._parts, 1))
        return Graph(dict(self._tensors), ops, held=frozenset(self._kept.union(self._living.values())))

    def allocation(self) -> Allocation:
        """Where everything was."""
        return Allocation(dict(self._places))

    def profile(self, clock: str) -> Profile:
        """When everything ran."""
        parts = enumerate(self._parts, 1)
        return Profile({clock: {_op_id(part, number): part.work.interval for number, part in parts}})

    def notes(self) -> list[Note]:
        """What had to be assumed."""
        what = "ops tell what was allocated and freed in them, not what they read"
        found = [Note(NoteKind.INFERRED, "", what)]
        before = sum(tensor.kind is Kind.INPUT for tensor in self._tensors.values())
        if before:
            what = f"{before} blocks were there before: shown as inputs"
            found.append(Note(NoteKind.INFERRED, "", what))
        if self._missing_frees:
            what = f"{self._missing_frees} addresses were taken twice: taken to be freed just before"
            found.append(Note(NoteKind.REPAIRED, "", what))
        return found


def continued(work: Work) -> Work:
    """The same work later on: its time has been counted."""
    end = work.interval.end_seconds
    return Work(work.type, work.phase, work.scope, work.source, Interval(end, end, end))


def _op_id(part: _Part, number: int) -> str:
    return f"{part.work.type}.{number}"


def _op(part: _Part, number: int, device: str) -> Op:
    made = set(part.made)  # what is freed where it was made, no other op needs
    return Op(
        _op_id(part, number),
        part.work.type,
        part.work.phase,
        inputs=tuple(Use(name) for name in part.freed if name not in made),
        outputs=tuple(map(Use, part.made)),
        attributes=dict(OPERANDS_UNKNOWN),
        device=device,
        scope=part.work.scope,
        source=part.work.source,
    )
