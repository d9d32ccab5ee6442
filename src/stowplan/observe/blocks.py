"""The memory of tensors while a script runs: one block for each storage, from its allocation to its end.

A clock counts allocations and frees. Each block knows the phase, module and line that allocated it; its kind
is known in the end. Workspace that a kernel takes and gives back stands beside them, at the clock of its op.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stowplan.observe.record import (
    ACTIVATIONS,
    EVALUATION,
    KERNELS,
    LASTING,
    OTHER,
    TEMPORARIES,
    Alive,
    CodePlace,
    PeakShare,
)

FORWARD, LOSS, BACKWARD = "forward", "loss", "backward"
STEP, EVALUATING, BETWEEN = "optimizer step", "evaluation", "between"
PHASES = (FORWARD, LOSS, BACKWARD, STEP, EVALUATING, BETWEEN)
_FOREVER = 1 << 62


class BlockOrigin(NamedTuple):
    """Who allocates: phase, module, file, line, and the number of the outermost call (-1 outside)."""

    phase: str
    module: str = ""
    file: str = ""
    line: int = 0
    call: int = -1


BEFORE = BlockOrigin("before")


@dataclass(slots=True, eq=False)
class LiveBlock:
    """A storage. `born` is 0 if it was there before observing began; `died` is endless while it lives."""

    nbytes: int
    born: int
    origin: BlockOrigin
    op: str
    kind: str = ""
    died: int = _FOREVER
    ended: BlockOrigin | None = None  # of a gradient: where it was freed

    @property
    def is_alive(self) -> bool:
        """Whether it has not been freed."""
        return self.died == _FOREVER


class BlockSpan(NamedTuple):
    """A block, or the workspace of an op, while it takes memory."""

    begin: int
    end: int
    nbytes: int
    block: LiveBlock


@dataclass(slots=True)
class Blocks:
    """All blocks in the order of their allocation, and the marks of the clock."""

    all: list[LiveBlock] = field(default_factory=list)
    workspaces: list[LiveBlock] = field(default_factory=list)
    clock: int = 0
    alive_bytes: int = 0
    most_bytes: int = 0  # that were alive at once, since whoever reads it has set it back
    phases: list[tuple[int, str]] = field(default_factory=list)  # from this clock on
    backwards: list[int] = field(default_factory=list)  # clocks at which one begins
    keeps: bool = True  # whether blocks that died are still asked for

    def begin(
        self, nbytes: int, origin: BlockOrigin, op: str, kind: str = "", *, is_old: bool = False
    ) -> LiveBlock:
        """A storage that is new, or `is_old` and met for the first time."""
        self.clock += 1
        block = LiveBlock(nbytes, 0 if is_old else self.clock, origin, op, kind)
        self.alive_bytes += nbytes
        self.most_bytes = max(self.most_bytes, self.alive_bytes)
        if self.keeps:
            self.all.append(block)
        return block

    def end(self, block: LiveBlock) -> None:
        """The storage is freed."""
        self.clock += 1
        block.died = self.clock
        self.alive_bytes -= block.nbytes

    def resize(self, block: LiveBlock, nbytes: int) -> None:
        """The storage was changed in size."""
        self.alive_bytes += nbytes - block.nbytes
        self.most_bytes = max(self.most_bytes, self.alive_bytes)
        block.nbytes = nbytes

    def within(self, nbytes: int, origin: BlockOrigin, op: str) -> None:
        """An op that has just ended took this much more while it ran."""
        self.clock += 1
        self.most_bytes = max(self.most_bytes, self.alive_bytes + nbytes)
        if self.keeps:
            self.workspaces.append(LiveBlock(nbytes, self.clock, origin, op, KERNELS, self.clock + 1))
        self.clock += 1

    def enter(self, phase: str) -> None:
        """The phase changes."""
        if self.keeps and (not self.phases or self.phases[-1][1] != phase):
            self.clock += 1
            self.phases.append((self.clock, phase))
            if phase == BACKWARD:
                self.backwards.append(self.clock)

    def relabel(self, forwards: Iterable[int]) -> None:
        """These phases, by number, were evaluation, and so was what followed each until the next call."""
        for number in forwards:
            for at in range(number, min(number + 2, len(self.phases))):
                if self.phases[at][1] in (FORWARD, LOSS):
                    self.phases[at] = (self.phases[at][0], EVALUATING)

    def phase_at(self, clock: int) -> str:
        """The phase at this time."""
        at = bisect_left(self.phases, (clock + 1, ""))
        return self.phases[at - 1][1] if at else BETWEEN

    def classify(self, is_evaluation: Callable[[int], bool]) -> None:
        """Give each block its kind; a call that `is_evaluation` was never differentiated."""
        for block in self.all:
            block.kind = self.kind_of(block, is_evaluation)

    def kind_of(self, block: LiveBlock, is_evaluation: Callable[[int], bool]) -> str:
        """What a block is, by where it was allocated and how long it lives."""
        origin = block.origin
        if block.kind:
            return block.kind
        if origin.phase == BEFORE.phase:
            return OTHER
        if origin.phase == EVALUATING or (origin.call >= 0 and is_evaluation(origin.call)):
            return EVALUATION
        if origin.phase in (FORWARD, LOSS) and self._meets_backward(block):
            return ACTIVATIONS
        return TEMPORARIES

    def _meets_backward(self, block: LiveBlock) -> bool:
        at = bisect_left(self.backwards, block.born)
        return block.is_alive if at == len(self.backwards) else block.died > self.backwards[at]

    def spans(self, begin: int, end: int) -> Iterator[BlockSpan]:
        """What takes memory at some time between the clocks."""
        for block in (*self.all, *self.workspaces):
            if block.died > begin and block.born <= end:
                yield BlockSpan(max(block.born, begin), min(block.died, end + 1), block.nbytes, block)


def peak_of(spans: Iterable[BlockSpan]) -> tuple[int, int]:
    """The most bytes at once, and when they are first reached."""
    events: list[tuple[int, int]] = []
    for span in spans:
        if span.end > span.begin:
            events += [(span.begin, span.nbytes), (span.end, -span.nbytes)]
    events.sort()  # a free comes before an allocation at the same clock
    alive = most = at = 0
    for clock, nbytes in events:
        alive += nbytes
        if alive > most:
            most, at = alive, clock
    return most, at


def most_by_phase(blocks: Blocks, begin: int, end: int) -> dict[str, int]:
    """The most bytes alive in each phase between the clocks."""
    events: list[tuple[int, int]] = []
    for span in blocks.spans(begin, end):
        events += [(span.begin, span.nbytes), (span.end, -span.nbytes)]
    events += [(clock, 0) for clock, _ in blocks.phases if begin <= clock <= end]
    events.sort()
    found: dict[str, int] = {}
    alive = at = 0
    for number, (clock, nbytes) in enumerate(events):
        alive += nbytes
        if clock > end:
            break
        if number + 1 < len(events) and events[number + 1][0] == clock:
            continue
        while at + 1 < len(blocks.phases) and blocks.phases[at + 1][0] <= clock:
            at += 1
        name = blocks.phases[at][1] if blocks.phases and blocks.phases[at][0] <= clock else BETWEEN
        found[name] = max(found.get(name, 0), alive)
    return found


def alive_at(blocks: Blocks, clock: int) -> Alive:
    """What is alive at one moment, by kind and by line."""
    alive = [span.block for span in blocks.spans(clock, clock)]
    return described(alive, blocks.phase_at(clock))


def described(alive: Sequence[LiveBlock], phase: str) -> Alive:
    """Blocks by kind and by line, the most bytes first."""
    kinds: dict[str, int] = {}
    for block in alive:
        kinds[block.kind] = kinds.get(block.kind, 0) + block.nbytes
    shares = [PeakShare(kind, nbytes) for kind, nbytes in sorted(kinds.items(), key=lambda item: -item[1])]
    lines = places_of(block for block in alive if block.kind not in LASTING)
    return Alive(sum(kinds.values()), phase, shares, lines)


def places_of(blocks: Iterable[LiveBlock]) -> list[CodePlace]:
    """Blocks of the same kind, line and module (numbers in its path aside) as one, the most bytes first."""
    groups: dict[tuple[str, str, int, str], list[LiveBlock]] = {}
    for block in blocks:
        origin = block.origin
        module = ".".join("*" if part.isdecimal() else part for part in origin.module.split("."))
        groups.setdefault((block.kind, origin.file, origin.line, module), []).append(block)
    places = []
    for (kind, file, line, module), group in groups.items():
        paths = {block.origin.module for block in group}
        largest = max(group, key=lambda block: block.nbytes)
        path = paths.pop() if len(paths) == 1 else module
        nbytes = sum(block.nbytes for block in group)
        places.append(CodePlace(kind, file, line, path, largest.op, nbytes, len(group)))
    return sorted(places, key=lambda place: -place.nbytes)
