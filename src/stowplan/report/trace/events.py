"""The events that a trace is made of, as the trace event format spells them. Times are in microseconds."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from stowplan.analyse.timeline import Timeline
from stowplan.ir import Op

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
    """What is counted from here on."""
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
