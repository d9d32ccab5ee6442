"""Timelines as a Chrome trace, which Perfetto opens: slices per stream, memory counters, flow arrows.

Measured slices keep their own clock. Clocks need not be aligned, so each is a process that begins at zero.
Projected ops run one after the other on one track; each transfer engine has its own track. Times are in
microseconds.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

from stowplan.analyse.timeline import Doing, Timeline
from stowplan.ir import Interval, Op
from stowplan.plan.explain.transfers import TransferSpan
from stowplan.plan.pricing import Basis
from stowplan.plan.record import Record
from stowplan.report.page.subject import PageSubject

Event: TypeAlias = dict[str, object]

MICROSECONDS = 1e6


def named(process: int, what: str, name: str, thread: int = 0) -> Event:
    """The name of a process or a thread."""
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def op_slice(op: Op, category: str, process: int, thread: int, start: float, duration: float) -> Event:
    """An op while it runs."""
    told = {"op": op.id, "phase": str(op.phase), "module": op.scope, "source": op.source}
    return plain_slice(op.type, category, process, thread, start, duration) | {
        "args": {name: value for name, value in told.items() if value}
    }


def plain_slice(name: str, category: str, process: int, thread: int, start: float, duration: float) -> Event:
    """Anything that takes time."""
    place = {"pid": process, "tid": thread, "ts": start, "dur": duration}
    return {"ph": "X", "name": name, "cat": category, **place, "args": {}}


def counter(process: int, name: str, at: float, values: Mapping[str, int]) -> Event:
    """A counter event: the values from this time on."""
    return {"ph": "C", "name": name, "pid": process, "tid": 0, "ts": at, "args": dict(values)}


def arrow(mark: str, identity: str, name: str, category: str, process: int, thread: int, at: float) -> Event:
    """One end of an arrow: mark "s" where it starts, "f" where it ends, inside of a slice each."""
    end: Event = {"ph": mark, "id": identity, "name": name, "cat": category}
    return end | {"pid": process, "tid": thread, "ts": at} | ({"bp": "e"} if mark == "f" else {})


def memory_counters(timeline: Timeline, starts: Iterable[float], process: int) -> Iterator[Event]:
    """The bytes of each kind as each run begins; those in a tier are counted apart."""
    by_kind = {str(kind): curve.tolist() for kind, curve in timeline.bytes_by_kind().items()}
    away = timeline.away_bytes().tolist() if timeline.away else []
    for run, start in zip(range(len(timeline.runs)), starts, strict=False):
        yield counter(process, "memory", start, {kind: curve[run] for kind, curve in by_kind.items()})
        if away:
            yield counter(process, "offloaded", start, {"bytes": away[run]})


def clock_events(
    subject: PageSubject, clock: str, intervals: Mapping[str, Interval], process: int
) -> Iterator[Event]:
    """Waiting and kernels on tracks of their own, and the memory as each kernel begins."""
    begin = min(interval.start_seconds for interval in intervals.values())
    ops = {op.id: op for op in subject.graph.ops}
    known = {op: interval for op, interval in intervals.items() if op in ops}
    yield named(process, "process_name", f"{subject.name}: {clock} clock")
    waiting = {op: (i.start_seconds - begin, i.kernel_seconds - begin) for op, i in known.items()}
    kernels = {op: (i.kernel_seconds - begin, i.end_seconds - begin) for op, i in known.items()}
    yield from _tracks("issued", waiting, ops, process, first_thread=1)
    yield from _tracks("kernel", kernels, ops, process, first_thread=100)
    runs = subject.timeline.runs
    if all(run.op in kernels for run in runs):
        yield from memory_counters(subject.timeline, _rising(kernels[run.op][0] for run in runs), process)


def _rising(seconds: Iterable[float]) -> Iterator[float]:
    """Microseconds that never go back, for kernels that overtake each other."""
    return accumulate((at * MICROSECONDS for at in seconds), max)


def _tracks(
    name: str,
    spans: Mapping[str, tuple[float, float]],
    ops: Mapping[str, Op],
    process: int,
    first_thread: int,
) -> Iterator[Event]:
    """Slices of one track must not overlap: a span goes to the first track that is free when it begins."""
    ends: list[float] = []
    for op, (start, end) in sorted(spans.items(), key=lambda item: item[1]):
        track = next((at for at, busy_until in enumerate(ends) if busy_until <= start), len(ends))
        if track == len(ends):
            ends.append(0.0)
            label = name if not track else f"{name} {track + 1}"
            yield named(process, "thread_name", label, thread=first_thread + track)
        ends[track] = max(start, end)
        duration = max(0.0, end - start) * MICROSECONDS
        yield op_slice(ops[op], name, process, first_thread + track, start * MICROSECONDS, duration)


def record_events(name: str, record: Record, process: int) -> Iterator[Event]:
    """The bytes that a run measured, when it measured them."""
    yield named(process, "process_name", f"{name}: measured on {record.device}")
    for at, level in zip(record.measured_curve_seconds, record.measured_curve_bytes, strict=True):
        yield counter(process, "measured memory", at * MICROSECONDS, {"bytes": level})


_MACS_PER_SECOND = 1e12  # only ratios mean anything there; this puts steps into a range that viewers like
_THREADS = {Doing.COMPUTE: 1, Doing.RECOMPUTE: 1, Doing.STORE: 2, Doing.LOAD: 3}
_TRACKS = {1: "steps", 2: "stores", 3: "loads"}


def projected_events(subject: PageSubject, process: int) -> Iterator[Event]:
    """Every run at its projected time, memory counters, and arrows between copies of a tensor."""
    timeline, spans = subject.timeline, _spans(subject)
    yield named(process, "process_name", f"{subject.name}: projected, {_clock(subject)}")
    for thread in sorted({1, *(_THREADS[run.doing] for run in timeline.runs)}):
        yield named(process, "thread_name", _TRACKS[thread], thread=thread)
    ops = {op.id: op for op in timeline.graph.ops}
    for run, span in zip(timeline.runs, spans, strict=True):
        thread = _THREADS[run.doing]
        yield op_slice(ops[run.op], str(run.doing), process, thread, span.start_seconds, span.seconds)
    yield from _waits(subject, process)
    starts = accumulate((span.start_seconds for span in spans), max)  # a transfer may begin after its turn
    yield from memory_counters(timeline, starts, process)
    yield from _arrows(timeline, spans, process)


def _spans(subject: PageSubject) -> list[TransferSpan]:
    """Microseconds by run; a graph without times gets one per step."""
    if subject.clock is not None:
        scale = _scale(subject)
        return [
            TransferSpan(span.start_seconds * scale, span.end_seconds * scale) for span in subject.clock.spans
        ]
    seconds = (
        [max(0.0, subject.seconds[run.op]) for run in subject.timeline.runs] if subject.seconds else None
    )
    durations = (
        [1.0] * len(subject.timeline.runs) if seconds is None else [s * _scale(subject) for s in seconds]
    )
    return [TransferSpan(start, end) for start, end in pairwise((0.0, *accumulate(durations)))]


def _scale(subject: PageSubject) -> float:
    return MICROSECONDS / (_MACS_PER_SECOND if subject.timed_by == Basis.MACS else 1.0)


def _clock(subject: PageSubject) -> str:
    if not subject.seconds:
        return "a microsecond per step"
    return "a million MACs per microsecond" if subject.timed_by == Basis.MACS else subject.timed_by


def _waits(subject: PageSubject, process: int) -> Iterator[Event]:
    """The waits of ops for transfers, as slices in the gaps between them."""
    scale = _scale(subject)
    for stall in subject.clock.stalls if subject.clock else ():
        name, start = f"wait for {stall.tensor}", stall.start_seconds * scale
        yield plain_slice(name, "wait", process, 1, start, stall.seconds * scale)


def _arrows(timeline: Timeline, spans: Sequence[TransferSpan], process: int) -> Iterator[Event]:
    """From a tensor's store to each of its loads, from its first run to each recomputation."""
    first = {stay.tensor: stay.first for stay in timeline.stays if stay.made and not stay.copy}
    stored = {stay.tensor: stay.first for stay in timeline.away}
    for number, stay in enumerate(timeline.stays):
        if not stay.copy:
            continue
        loaded = timeline.runs[stay.first].doing is Doing.LOAD
        source = (stored if loaded else first).get(stay.tensor)
        category = "offloaded" if loaded else "recomputed"
        for mark, run in (("s", source), ("f", stay.first)) if source is not None else ():
            thread = _THREADS[timeline.runs[run].doing]
            middle = (spans[run].start_seconds + spans[run].end_seconds) / 2
            yield arrow(mark, f"{process}.{number}", stay.tensor, category, process, thread, middle)


_PROJECTED, _MEASURED, _CLOCKS = 1, 2, 10  # process numbers
_APART = 100  # between those of two subjects


def trace_of(subjects: Sequence[PageSubject]) -> bytes:
    """The trace of one or more subjects, compressed."""
    events = [event for number, subject in enumerate(subjects) for event in _events(subject, _APART * number)]
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"writer": "stowplan"}}
    return gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), mtime=0)


def _events(subject: PageSubject, base: int) -> Iterator[Event]:
    profile = subject.document.profile if subject.document else None
    clocks = [found for found in profile.clocks.items() if found[1]] if profile else []
    for number, (clock, intervals) in enumerate(clocks):
        yield from clock_events(subject, clock, intervals, base + _CLOCKS + number)
    if not clocks:
        yield from projected_events(subject, base + _PROJECTED)
    if subject.record:
        yield from record_events(subject.name, subject.record, base + _MEASURED)
