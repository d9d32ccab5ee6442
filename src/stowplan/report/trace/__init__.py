"""Timelines as a Chrome trace, which Perfetto opens: slices per stream, memory counters, flow arrows."""

import gzip
import json
from collections.abc import Iterator, Sequence

from stowplan.report.page.subject import Subject
from stowplan.report.trace.events import Event
from stowplan.report.trace.measured import clock_events, record_events
from stowplan.report.trace.projected import projected_events

_PROJECTED, _MEASURED, _CLOCKS = 1, 2, 10  # process numbers
_APART = 100  # between those of two subjects


def trace_of(subjects: Sequence[Subject]) -> bytes:
    """The trace of one or more subjects, compressed."""
    events = [event for number, subject in enumerate(subjects) for event in _events(subject, _APART * number)]
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"writer": "stowplan"}}
    return gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), mtime=0)


def _events(subject: Subject, base: int) -> Iterator[Event]:
    profile = subject.document.profile if subject.document else None
    clocks = [found for found in profile.clocks.items() if found[1]] if profile else []
    for number, (clock, intervals) in enumerate(clocks):
        yield from clock_events(subject, clock, intervals, base + _CLOCKS + number)
    if not clocks:
        yield from projected_events(subject, base + _PROJECTED)
    if subject.record:
        yield from record_events(subject.name, subject.record, base + _MEASURED)
