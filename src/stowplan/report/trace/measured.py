"""What was measured: slices of a profile on the clock they were measured by, and the memory of a run.

Clocks need not be aligned, so each is a process of its own that begins at zero.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from stowplan.ir import Interval, Op
from stowplan.plan.record import Record
from stowplan.report.page.subject import Subject
from stowplan.report.trace.events import MICROSECONDS, Event, counter, memory_counters, named, op_slice


def clock_events(
    subject: Subject, clock: str, intervals: Mapping[str, Interval], process: int
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
