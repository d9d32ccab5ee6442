"""A history of allocations and frees as a graph: an op makes what it allocates and reads what it frees.

Ops are split so that in each the allocations come before the frees. The graph's memory curve is then, op by
op, the most that the run had allocated.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from dataclasses import dataclass, field

from stowplan.ir import (
    Allocation,
    Graph,
    Interval,
    Kind,
    Note,
    NoteKind,
    Op,
    Phase,
    Profile,
    Reserved,
    Tensor,
    Use,
)

_AT_ONCE = Interval(0.0, 0.0, 0.0)
_OPEN = -1  # the position of an op that has not come
OPERANDS_UNKNOWN: Mapping[str, str] = {"operands": "unknown"}
"""The operands of such an op are unknown, so `ops.effects` does not let it be recomputed."""


@dataclass(frozen=True, slots=True)
class Work:
    """What the program was doing: an op's type, phase, place in the code, and its time in seconds."""

    type: str
    phase: Phase
    scope: str = ""
    source: str = ""
    interval: Interval = _AT_ONCE


@dataclass(slots=True)
class _Part:
    """A part of one work: it allocates, then it frees."""

    work: Work
    made: list[str] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)


@dataclass(slots=True)
class AllocationHistory:
    """Receives events in order and becomes the graph, the addresses and the times of a run."""

    device: str
    _parts: list[_Part] = field(default_factory=list)
    _tensors: dict[str, Tensor] = field(default_factory=dict)
    _places: dict[str, tuple[int, int]] = field(default_factory=dict)
    _living: dict[int, str] = field(default_factory=dict)
    _times_at: dict[int, int] = field(default_factory=dict)
    _kept: set[str] = field(default_factory=set)
    _open: list[Reserved] = field(default_factory=list)  # segments of the allocator, in order of address
    _ended: list[Reserved] = field(default_factory=list)
    _missing_frees: int = 0

    def enter(self, work: Work) -> None:
        """From now on this work runs."""
        self._parts.append(_Part(work))

    def existed(self, address: int, nbytes: int) -> None:
        """Memory allocated before the first op."""
        self._place(address, nbytes, Kind.INPUT)

    def complete_before(self, before_bytes: int) -> None:
        """Given, at the end, all bytes allocated before the first op: the rest was never freed."""
        known = sum(tensor.nbytes or 0 for tensor in self._tensors.values() if tensor.kind is Kind.INPUT)
        if before_bytes > known:
            rest = Tensor("before", Kind.INPUT, nbytes=before_bytes - known, device=self.device)
            self._tensors[rest.id] = rest
            self._kept.add(rest.id)

    def allocate(self, address: int, nbytes: int) -> None:
        """The current work allocates memory."""
        if address in self._living:
            self._missing_frees += 1
            self.free(address, nbytes)
        if self._parts[-1].freed:
            self.enter(continued(self._parts[-1].work))
        self._parts[-1].made.append(self._place(address, nbytes, Kind.ACTIVATION))

    def free(self, address: int, nbytes: int) -> None:
        """The current work frees memory; memory that no work allocated existed before."""
        if address not in self._living:
            self.existed(address, nbytes)
        self._parts[-1].freed.append(self._living.pop(address))

    def reserve(self, address: int, nbytes: int) -> None:
        """The allocator takes memory from the device, for the work that comes next."""
        self._end(address, nbytes)
        insort(self._open, Reserved(address, nbytes, len(self._parts), _OPEN))

    def give_back(self, address: int, nbytes: int) -> None:
        """The allocator gives memory back to the device."""
        self.had(address, nbytes)
        self._end(address, nbytes)

    def had(self, address: int, nbytes: int) -> None:
        """The allocator has this memory now; what it did not take in sight was there at the beginning."""
        end, found, there = address + nbytes, list[Reserved](), self._open[self._within(address, nbytes)]
        for held in there:
            if held.address > address:
                found.append(Reserved(address, held.address - address, 0, _OPEN))
            address = held.address + held.nbytes
        if address < end:
            found.append(Reserved(address, end - address, 0, _OPEN))
        for held in found:
            insort(self._open, held)

    def _end(self, address: int, nbytes: int) -> None:
        """Open segments end where they are in this range; the rest of them stays."""
        where, now = self._within(address, nbytes), max(0, len(self._parts) - 1)
        rest = []
        for held in self._open[where]:
            begins, ends = max(held.address, address), min(held.address + held.nbytes, address + nbytes)
            self._ended.append(Reserved(begins, ends - begins, held.first, max(held.first, now)))
            before, after = begins - held.address, held.address + held.nbytes - ends
            rest += [held._replace(nbytes=before)] if before else []
            rest += [held._replace(address=ends, nbytes=after)] if after else []
        self._open[where] = rest

    def _within(self, address: int, nbytes: int) -> slice:
        """The open segments that overlap a range; open ones do not overlap each other."""
        low = bisect_right(self._open, address, key=_address)
        if low and address < self._open[low - 1].address + self._open[low - 1].nbytes:
            low -= 1
        return slice(low, max(low, bisect_left(self._open, address + nbytes, key=_address)))

    def _place(self, address: int, nbytes: int, kind: Kind) -> str:
        count = self._times_at.get(address, 0) + 1
        self._times_at[address] = count
        name = f"{address:#x}" + (f".{count}" if count > 1 else "")
        self._tensors[name] = Tensor(name, kind, nbytes=nbytes, device=self.device)
        self._places[name] = (address, nbytes)
        self._living[address] = name
        return name

    def graph(self) -> Graph:
        """An op for each part; memory that was never freed is held."""
        ops = tuple(_op(part, number, self.device) for number, part in enumerate(self._parts, 1))
        return Graph(dict(self._tensors), ops, held=frozenset(self._kept.union(self._living.values())))

    def allocation(self) -> Allocation:
        """The address of each tensor, and the segments."""
        last = max(0, len(self._parts) - 1)
        still = (held._replace(last=max(held.first, last)) for held in self._open)
        return Allocation(dict(self._places), tuple(sorted((*self._ended, *still))))

    def profile(self, clock: str) -> Profile:
        """The time of each op."""
        parts = enumerate(self._parts, 1)
        return Profile({clock: {_op_id(part, number): part.work.interval for number, part in parts}})

    def notes(self) -> list[Note]:
        """The assumptions."""
        what = "ops show what was allocated and freed in them, not what they read"
        found = [Note(NoteKind.INFERRED, "", what)]
        before = sum(tensor.kind is Kind.INPUT for tensor in self._tensors.values())
        if before:
            what = f"{before} blocks existed before: shown as inputs"
            found.append(Note(NoteKind.INFERRED, "", what))
        if self._missing_frees:
            what = f"{self._missing_frees} addresses were allocated twice: assumed freed just before"
            found.append(Note(NoteKind.REPAIRED, "", what))
        return found


def _address(held: Reserved) -> int:
    return held.address


def continued(work: Work) -> Work:
    """The same work later on, with no time of its own."""
    end = work.interval.end_seconds
    return Work(work.type, work.phase, work.scope, work.source, Interval(end, end, end))


def _op_id(part: _Part, number: int) -> str:
    return f"{part.work.type}.{number}"


def _op(part: _Part, number: int, device: str) -> Op:
    made = set(part.made)  # no other op needs what is freed where it was made
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
