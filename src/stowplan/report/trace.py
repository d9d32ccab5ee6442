"""A timeline as a Chrome trace, which Perfetto opens: slices, memory counters, flow arrows.

Projected slices stand on one track per subject. Slices of a profile stand on the clock they were measured by;
clocks need not be aligned, so each is a process of its own that begins at zero.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

from stowplan.analyse.timeline import Timeline
from stowplan.ir import Interval, Op, Profile
from stowplan.plan.pricing import Basis
from stowplan.plan.record import Record
from stowplan.report.page.subject import Subject

Event: TypeAlias = dict[str, object]

_MICROSECONDS = 1e6
_MACS_PER_SECOND = 1e12  # only ratios mean anything there; this puts steps into a range that viewers like
_PROJECTED, _MEASURED, _CLOCKS = 1, 2, 10  # process numbers


def trace_of(subjects: Sequence[Subject]) -> bytes:
    """The trace of one or more subjects, compressed."""
    events = [event for number, subject in enumerate(subjects) for event in _events(subject, 100 * number)]
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"writer": "stowplan"}}
    return gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), mtime=0)


def _events(subject: Subject, base: int) -> Iterator[Event]:
    profile = subject.document.profile if subject.document else None
    if profile and any(profile.clocks.values()):
        yield from _of_profile(subject, profile, base + _CLOCKS)
    else:
        yield from _of_timeline(subject, base + _PROJECTED)
    if subject.record:
        yield from _of_record(subject.name, subject.record, base + _MEASURED)


def _of_timeline(subject: Subject, process: int) -> Iterator[Event]:
    """Every run after the one before, as long as its op is priced."""
    timeline, durations = subject.timeline, _durations(subject)
    starts = [0.0, *accumulate(durations)]
    yield _named(process, "process_name", f"{subject.name}: projected, {_clock(subject)}")
    yield _named(process, "thread_name", "steps", thread=1)
    ops = {op.id: op for op in timeline.graph.ops}
    for run, start, duration in zip(timeline.runs, starts, durations, strict=False):
        yield _slice(ops[run.op], str(run.doing), process, 1, start, duration)
    yield from _memory(timeline, starts, process)
    yield from _remade(timeline, starts, durations, process)


def _durations(subject: Subject) -> list[float]:
    """Microseconds by run; a graph that nobody timed takes one per step."""
    if not subject.seconds:
        return [1.0] * len(subject.timeline.runs)
    scale = _MICROSECONDS / (_MACS_PER_SECOND if subject.timed_by == Basis.MACS else 1.0)
    return [max(0.0, subject.seconds[run.op]) * scale for run in subject.timeline.runs]


def _clock(subject: Subject) -> str:
    if not subject.seconds:
        return "a microsecond per step"
    return "a million MACs per microsecond" if subject.timed_by == Basis.MACS else subject.timed_by


def _slice(op: Op, category: str, process: int, thread: int, start: float, duration: float) -> Event:
    told = {"op": op.id, "phase": str(op.phase), "module": op.scope, "source": op.source}
    return {
        "ph": "X",
        "name": op.type,
        "cat": category,
        "pid": process,
        "tid": thread,
        "ts": start,
        "dur": duration,
        "args": {name: value for name, value in told.items() if value},
    }


def _memory(timeline: Timeline, starts: Iterable[float], process: int) -> Iterator[Event]:
    """The bytes of each kind as each run begins."""
    by_kind = {str(kind): curve.tolist() for kind, curve in timeline.bytes_by_kind().items()}
    for run, start in zip(range(len(timeline.runs)), starts, strict=False):
        yield _counter(process, "memory", start, {kind: curve[run] for kind, curve in by_kind.items()})


def _counter(process: int, name: str, at: float, values: Mapping[str, int]) -> Event:
    return {"ph": "C", "name": name, "pid": process, "tid": 0, "ts": at, "args": dict(values)}


def _remade(
    timeline: Timeline, starts: Sequence[float], durations: Sequence[float], process: int
) -> Iterator[Event]:
    """An arrow from the run that first made a tensor to each run that made it again."""
    first = {stay.tensor: stay.first for stay in timeline.stays if stay.made and not stay.copy}
    for number, stay in enumerate(timeline.stays):
        if stay.copy and stay.tensor in first:
            ends = (("s", first[stay.tensor]), ("f", stay.first))
            for mark, run in ends:
                middle = starts[run] + durations[run] / 2
                yield _arrow(mark, f"{process}.{number}", stay.tensor, process, middle)


def _arrow(mark: str, identity: str, name: str, process: int, at: float) -> Event:
    arrow: Event = {"ph": mark, "id": identity, "name": name, "cat": "made again"}
    return arrow | {"pid": process, "tid": 1, "ts": at} | ({"bp": "e"} if mark == "f" else {})


def _of_profile(subject: Subject, profile: Profile, base: int) -> Iterator[Event]:
    for number, (clock, intervals) in enumerate(profile.clocks.items()):
        if intervals:
            yield from _of_clock(subject, clock, intervals, base + number)


def _of_clock(
    subject: Subject, clock: str, intervals: Mapping[str, Interval], process: int
) -> Iterator[Event]:
    """Waiting and kernels on tracks of their own, and the memory as each kernel begins."""
    begin = min(interval.start_seconds for interval in intervals.values())
    ops = {op.id: op for op in subject.graph.ops}
    known = {op: interval for op, interval in intervals.items() if op in ops}
    yield _named(process, "process_name", f"{subject.name}: {clock} clock")
    waiting = {op: (i.start_seconds - begin, i.kernel_seconds - begin) for op, i in known.items()}
    kernels = {op: (i.kernel_seconds - begin, i.end_seconds - begin) for op, i in known.items()}
    yield from _tracks("issued", waiting, ops, process, first_thread=1)
    yield from _tracks("kernel", kernels, ops, process, first_thread=100)
    runs = subject.timeline.runs
    if all(run.op in kernels for run in runs):
        yield from _memory(subject.timeline, _rising(kernels[run.op][0] for run in runs), process)


def _rising(seconds: Iterable[float]) -> Iterator[float]:
    """Microseconds that never go back, for kernels that overtake each other."""
    return accumulate((at * _MICROSECONDS for at in seconds), max)


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
            yield _named(process, "thread_name", label, thread=first_thread + track)
        ends[track] = max(start, end)
        duration = max(0.0, end - start) * _MICROSECONDS
        yield _slice(ops[op], name, process, first_thread + track, start * _MICROSECONDS, duration)


def _of_record(name: str, record: Record, process: int) -> Iterator[Event]:
    """The bytes that a run measured, when it measured them."""
    yield _named(process, "process_name", f"{name}: measured on {record.device}")
    for at, level in zip(record.measured_curve_seconds, record.measured_curve_bytes, strict=True):
        yield _counter(process, "measured memory", at * _MICROSECONDS, {"bytes": level})


def _named(process: int, what: str, name: str, thread: int = 0) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
