"""Chrome traces that `torch.profiler` exports with `profile_memory=True`: ops, their times, their memory."""

from stowplan.formats.checked import checked
from stowplan.formats.torch_trace.calls import calls_of
from stowplan.formats.torch_trace.history import history_of
from stowplan.formats.torch_trace.records import parse
from stowplan.ir import Document

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
