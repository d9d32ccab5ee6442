"""What is projected: ops one after the other on one track, each transfer's engine on a track of its own."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from stowplan.analyse.timeline import Doing, Timeline
from stowplan.plan.explain.transfers import Span
from stowplan.plan.pricing import Basis
from stowplan.report.page.subject import Subject
from stowplan.report.trace.events import (
    MICROSECONDS,
    Event,
    arrow,
    memory_counters,
    named,
    op_slice,
    plain_slice,
)

_MACS_PER_SECOND = 1e12  # only ratios mean anything there; this puts steps into a range that viewers like
_THREADS = {Doing.COMPUTE: 1, Doing.AGAIN: 1, Doing.STORE: 2, Doing.LOAD: 3}
_TRACKS = {1: "steps", 2: "stores", 3: "loads"}


def projected_events(subject: Subject, process: int) -> Iterator[Event]:
    """Every run when it is projected to run, the memory meanwhile, and arrows between copies of a tensor."""
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


def _spans(subject: Subject) -> list[Span]:
    """Microseconds by run; a graph that nobody timed takes one per step."""
    if subject.clock is not None:
        scale = _scale(subject)
        return [Span(span.start_seconds * scale, span.end_seconds * scale) for span in subject.clock.spans]
    seconds = (
        [max(0.0, subject.seconds[run.op]) for run in subject.timeline.runs] if subject.seconds else None
    )
    durations = (
        [1.0] * len(subject.timeline.runs) if seconds is None else [s * _scale(subject) for s in seconds]
    )
    return [Span(start, end) for start, end in pairwise((0.0, *accumulate(durations)))]


def _scale(subject: Subject) -> float:
    return MICROSECONDS / (_MACS_PER_SECOND if subject.timed_by == Basis.MACS else 1.0)


def _clock(subject: Subject) -> str:
    if not subject.seconds:
        return "a microsecond per step"
    return "a million MACs per microsecond" if subject.timed_by == Basis.MACS else subject.timed_by


def _waits(subject: Subject, process: int) -> Iterator[Event]:
    """What the ops wait for, in the gaps between them."""
    scale = _scale(subject)
    for stall in subject.clock.stalls if subject.clock else ():
        name, start = f"wait for {stall.tensor}", stall.start_seconds * scale
        yield plain_slice(name, "wait", process, 1, start, stall.seconds * scale)


def _arrows(timeline: Timeline, spans: Sequence[Span], process: int) -> Iterator[Event]:
    """From a tensor's store to each of its loads, from its first run to each that made it again."""
    first = {stay.tensor: stay.first for stay in timeline.stays if stay.made and not stay.copy}
    stored = {stay.tensor: stay.first for stay in timeline.away}
    for number, stay in enumerate(timeline.stays):
        if not stay.copy:
            continue
        loaded = timeline.runs[stay.first].doing is Doing.LOAD
        source = (stored if loaded else first).get(stay.tensor)
        category = "offloaded" if loaded else "made again"
        for mark, run in (("s", source), ("f", stay.first)) if source is not None else ():
            thread = _THREADS[timeline.runs[run].doing]
            middle = (spans[run].start_seconds + spans[run].end_seconds) / 2
            yield arrow(mark, f"{process}.{number}", stay.tensor, category, process, thread, middle)
