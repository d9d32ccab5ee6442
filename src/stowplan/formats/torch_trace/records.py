"""The events of a trace, typed. A fault is told with its place: `traceEvents[12].dur`."""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct, field

from stowplan.errors import BadInput
from stowplan.formats.json_faults import bad_input_of

MOST_EVENTS = 2_000_000

Name: TypeAlias = Annotated[str, Meta(max_length=10_000, pattern=r"^[^\x00-\x1f\ud800-\udfff]*$")]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=2**62)]
Change: TypeAlias = Annotated[int, Meta(gt=-(2**62), lt=2**62)]
Microseconds: TypeAlias = Annotated[float, Meta(ge=-1e18, le=1e18)]
Number: TypeAlias = Annotated[int, Meta(gt=-(2**62), lt=2**62)]


class Arguments(Struct, frozen=True):
    """What is said of a memory event; other events say other things here."""

    change_bytes: Change = field(name="Bytes", default=0)
    address: Count | None = field(name="Addr", default=None)
    total_bytes: Count | None = field(name="Total Allocated", default=None)
    device_type: Number = field(name="Device Type", default=0)
    device_id: Number = field(name="Device Id", default=-1)


class Event(Struct, frozen=True):
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


class Trace(Struct, frozen=True):
    """The whole file, as far as it is of interest."""

    version: int = field(name="schemaVersion")
    events: tuple[Event, ...] = field(name="traceEvents")


def parse(text: str) -> Trace:
    """The trace in `text`, or BadInput at the first event that is not what it should be."""
    try:
        trace = msgspec.json.decode(text.encode(), type=Trace)
    except (msgspec.DecodeError, UnicodeEncodeError) as fault:
        raise bad_input_of(fault) from None
    except RecursionError:
        raise BadInput("nested deeper than any trace", where="$") from None
    if len(trace.events) > MOST_EVENTS:
        raise BadInput(f"more than {MOST_EVENTS:,} events", where="traceEvents")
    return trace
