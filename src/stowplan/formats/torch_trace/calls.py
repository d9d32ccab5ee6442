"""The events of a trace, typed, and the calls they form: spans nested by time on each thread.

An error names the place of the event: `traceEvents[12].dur`.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from stowplan.errors import BadInput
from stowplan.formats.checked import bad_input_of
from stowplan.ir import Phase

MOST_EVENTS = 2_000_000

Name: TypeAlias = Annotated[str, Meta(max_length=10_000, pattern=r"^[^\x00-\x1f\ud800-\udfff]*$")]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=2**62)]
Change: TypeAlias = Annotated[int, Meta(gt=-(2**62), lt=2**62)]
Microseconds: TypeAlias = Annotated[float, Meta(ge=-1e18, le=1e18)]
Number: TypeAlias = Annotated[int, Meta(gt=-(2**62), lt=2**62)]


class Arguments(Struct, frozen=True):
    """The arguments of a memory event; other events have other arguments."""

    change_bytes: Change = msgspec.field(name="Bytes", default=0)
    address: Count | None = msgspec.field(name="Addr", default=None)
    total_bytes: Count | None = msgspec.field(name="Total Allocated", default=None)
    device_type: Number = msgspec.field(name="Device Type", default=0)
    device_id: Number = msgspec.field(name="Device Id", default=-1)


class TraceEvent(Struct, frozen=True):
    """One event: a complete one ("X") has a duration, an instant one ("i") has none."""

    ph: Name
    name: Name = ""
    cat: Name = ""
    ts: Microseconds = 0.0
    dur: Annotated[float, Meta(ge=0, le=1e15)] = 0.0
    pid: Number | Name = 0
    tid: Number | Name = 0
    args: Arguments = Arguments()

    @property
    def is_memory(self) -> bool:
        """Whether memory was taken or given back."""
        return self.ph == "i" and self.name == "[memory]" and self.args.address is not None


class CallTrace(Struct, frozen=True):
    """The whole file, as far as it is of interest."""

    version: int = msgspec.field(name="schemaVersion")
    events: tuple[TraceEvent, ...] = msgspec.field(name="traceEvents")


def parse(text: str) -> CallTrace:
    """The trace in `text`, or BadInput at the first malformed event."""
    try:
        trace = msgspec.json.decode(text.encode(), type=CallTrace)
    except (msgspec.DecodeError, UnicodeEncodeError) as fault:
        raise bad_input_of(fault) from None
    except RecursionError:
        raise BadInput("nested deeper than any trace", where="$") from None
    if len(trace.events) > MOST_EVENTS:
        raise BadInput(f"more than {MOST_EVENTS:,} events", where="traceEvents")
    return trace


_SPANS = ("cpu_op", "user_annotation")
_PHASES = (
    ("autograd::engine::evaluate_function", Phase.BACKWARD),
    ("Optimizer.", Phase.UPDATE),
)
_ALLOCATORS = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "resize_")
)  # calls that ops make to get memory: whoever called them took it


@dataclass(slots=True, eq=False)
class TracedCall:
    """One span, and the one it lies in."""

    event: TraceEvent
    parent: "TracedCall | None"
    phase: Phase
    inner_us: float = 0.0
    is_leaf: bool = True

    @property
    def self_us(self) -> float:
        """Its time without that of the calls inside it."""
        return max(0.0, self.event.dur - self.inner_us)

    @property
    def end_us(self) -> float:
        return self.event.ts + self.event.dur


@dataclass(frozen=True, slots=True)
class TracedCalls:
    """All calls, and for each memory event, by its position in the trace, the innermost call around it."""

    all: list[TracedCall]
    around: Mapping[int, TracedCall | None]


@dataclass(slots=True)
class _Thread:
    """The open calls of one thread, while its events are read in order of time."""

    open: list[TracedCall] = field(default_factory=list)

    def innermost_at(self, time_us: float) -> TracedCall | None:
        """The call that runs at a time; those that ended before are closed."""
        while self.open and self.open[-1].end_us < time_us:
            self.open.pop()
        return self.open[-1] if self.open else None

    def enter(self, event: TraceEvent) -> TracedCall:
        """A call that begins inside what is open."""
        parent = self.innermost_at(event.ts)
        call = TracedCall(event, parent, _phase(event, parent))
        if parent:
            parent.inner_us += event.dur
            parent.is_leaf = False
        self.open.append(call)
        return call


def calls_of(trace: CallTrace) -> TracedCalls:
    """Nest the spans of each thread."""
    found = TracedCalls([], around := {})
    for events in _by_thread(trace.events).values():
        thread = _Thread()
        for position, event in sorted(events, key=_outer_first):
            if event.is_memory:
                around[position] = thread.innermost_at(event.ts)
            elif event.name not in _ALLOCATORS or thread.innermost_at(event.ts) is None:
                found.all.append(thread.enter(event))
    return found


def _by_thread(events: Iterable[TraceEvent]) -> dict[object, list[tuple[int, TraceEvent]]]:
    threads: dict[object, list[tuple[int, TraceEvent]]] = defaultdict(list)
    for position, event in enumerate(events):
        if event.is_memory or (event.ph == "X" and event.cat in _SPANS):
            threads[event.pid, event.tid].append((position, event))
    return threads


def _outer_first(entry: tuple[int, TraceEvent]) -> tuple[float, float, int]:
    """By time; of what begins together, the longest first."""
    position, event = entry
    return event.ts, -event.dur, position


def _phase(event: TraceEvent, parent: TracedCall | None) -> Phase:
    for beginning, phase in _PHASES:
        if event.name.startswith(beginning):
            return phase
    return parent.phase if parent else Phase.FORWARD
