"""Chrome traces that `torch.profiler` exports with `profile_memory=True`: ops, their times, their memory."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeAlias

from stowplan.errors import BadInput
from stowplan.formats.allocations import AllocationHistory, Work, continued
from stowplan.formats.checked import checked
from stowplan.formats.torch_trace.calls import (
    Arguments,
    CallTrace,
    TracedCall,
    TracedCalls,
    TraceEvent,
    calls_of,
    parse,
)
from stowplan.ir import Document, Interval, Note, NoteKind, Phase

FORMAT = "torch_trace"


def recognise(text: str) -> bool:
    """A JSON object that opens with the profiler's version of its schema."""
    head = text[:1024].lstrip()
    return head.startswith("{") and '"schemaVersion"' in head


def read(text: str) -> Document:
    """The ops of the run in their order, with what each allocated and freed, on the host's clock."""
    trace = parse(text)
    calls = calls_of(trace)
    history, notes = history_of(trace, calls)
    return Document(
        FORMAT,
        checked(history.graph(), {}, otherwise="traceEvents"),
        history.profile("host"),
        history.allocation(),
        notes=(*notes, *history.notes()),
        counts={
            "events": len(trace.events),
            "calls": len(calls.all),
            "memory_events": sum(event.is_memory for event in trace.events),
            "device_kernels": sum(event.cat == "kernel" for event in trace.events),
        },
    )


Device: TypeAlias = tuple[int, int]  # PyTorch's number of the type, and which one

_TYPES = {0: "cpu", 1: "cuda", 12: "xpu", 13: "mps", 20: "privateuseone"}


def history_of(trace: CallTrace, calls: TracedCalls) -> tuple[AllocationHistory, list[Note]]:
    """The history of the device with most memory events, and notes on what is left out."""
    counts = Counter(_device(event) for event in trace.events if event.is_memory)
    if not counts:
        raise BadInput("no memory events: profile with profile_memory=True", where="traceEvents")
    device = counts.most_common(1)[0][0]
    history = AllocationHistory(_name(device))
    _Replay(history, _began(trace)).run(trace, calls, device)
    history.complete_before(_bytes_before(trace, device))
    return history, [*_others(counts, device), *_kernels(trace.events)]


def _others(counts: Counter[Device], device: Device) -> Iterator[Note]:
    for other, count in counts.items():
        if other != device:
            what = f"{count} memory events of {_name(other)} are not shown"
            yield Note(NoteKind.ODD, "traceEvents", what)


def _kernels(events: Sequence[TraceEvent]) -> Iterator[Note]:
    kernels = sum(event.cat == "kernel" for event in events)
    if kernels:
        what = f"{kernels} kernels ran on a device: times here are the host's, of starting them"
        yield Note(NoteKind.ODD, "traceEvents", what)


def _device(event: TraceEvent) -> Device:
    return event.args.device_type, event.args.device_id


def _name(device: Device) -> str:
    kind, number = device
    name = _TYPES.get(kind, f"device type {kind}")
    return name if number < 0 else f"{name}:{number}"


def _bytes_before(trace: CallTrace, device: Device) -> int:
    """The bytes that were allocated when the trace began, by the count of its first event."""
    events = (event for event in trace.events if event.is_memory and _device(event) == device)
    first = min(events, key=lambda event: event.ts)
    total = first.args.total_bytes
    return 0 if total is None else total - first.args.change_bytes


def _began(trace: CallTrace) -> float:
    return min((event.ts for event in trace.events if event.is_memory or event.ph == "X"), default=0.0)


class _Replay:
    """Replays events into a history in order of time."""

    def __init__(self, history: AllocationHistory, began_us: float) -> None:
        self._history, self._began_us = history, began_us
        self._entered: set[TracedCall | None] = set()
        self._current: TracedCall | None = None

    def run(self, trace: CallTrace, calls: TracedCalls, device: Device) -> None:
        """Leaf calls begin ops; an allocation belongs to the op of the call around it."""
        leaves = ((call.event.ts, 0, call) for call in calls.all if call.is_leaf and _is_op(call))
        memory = (
            (trace.events[position].ts, position + 1, call)
            for position, call in calls.around.items()
            if _device(trace.events[position]) == device
        )
        for _, position, call in sorted(chain(leaves, memory), key=lambda item: item[:2]):
            if position == 0:
                self._enter(call)
            else:
                self._change(trace.events[position - 1].args, call)

    def _enter(self, call: TracedCall | None) -> None:
        """A call's own time counts once, at its first entry."""
        work = self._work(call)
        self._history.enter(continued(work) if call in self._entered else work)
        self._entered.add(call)
        self._current = call

    def _change(self, args: Arguments, call: TracedCall | None) -> None:
        """An allocation belongs to its call; a free ends the work that ran last."""
        assert args.address is not None
        grows = args.change_bytes > 0
        if not self._entered or (grows and call is not self._current):
            self._enter(call)
        if grows:
            self._history.allocate(args.address, args.change_bytes)
        else:
            self._history.free(args.address, -args.change_bytes)

    def _work(self, call: TracedCall | None) -> Work:
        if call is None:
            return Work("outside", Phase.FORWARD)
        end = (call.end_us - self._began_us) / 1e6
        start, itself = (call.event.ts - self._began_us) / 1e6, call.self_us / 1e6
        return Work(call.event.name, call.phase, interval=Interval(start, end - itself, end))


def _is_op(call: TracedCall) -> bool:
    return call.event.cat == "cpu_op"
