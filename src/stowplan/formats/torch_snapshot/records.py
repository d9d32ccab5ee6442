"""The records of a snapshot, typed. An error names the place: `device_traces[0][12].size`.

Many records may share a value, as they share call stacks: each value is decoded once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from stowplan.errors import BadInput

MOST_EVENTS = 1_000_000
MOST_FRAMES = 10_000  # of one call stack

Name: TypeAlias = Annotated[str, Meta(max_length=10_000, pattern=r"^[^\x00-\x1f\ud800-\udfff]*$")]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=2**62)]


class SnapshotFrame(Struct, frozen=True):
    """One call of a call stack."""

    filename: Name = ""
    line: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    name: Name = ""


class SnapshotBlock(Struct, frozen=True):
    """A piece of a segment; in old snapshots its address follows from the segment's."""

    size: Count
    state: Name
    address: Count | None = None
    requested_size: Count | None = None


class SnapshotSegment(Struct, frozen=True):
    """Memory that the allocator took from the device at once."""

    address: Count
    total_size: Count
    blocks: tuple[SnapshotBlock, ...]
    device: Annotated[int, Meta(ge=0, lt=2**16)] = 0
    segment_type: Name = ""
    stream: Count = 0
    is_expandable: bool = False
    segment_pool_id: tuple[Count, Count] = (0, 0)


class SnapshotEvent(Struct, frozen=True):
    """One action of the allocator; an event without an address concerns the whole device."""

    action: Name
    size: Count = 0
    addr: Count | None = None
    time_us: Annotated[int, Meta(ge=0, lt=2**62)] = 0
    stream: Count = 0


class SnapshotSettings(Struct, frozen=True):
    """How the allocator was configured."""

    conf: Name | None = field(name="PYTORCH_CUDA_ALLOC_CONF", default=None)
    new_conf: Name | None = field(name="PYTORCH_ALLOC_CONF", default=None)
    expandable_segments: bool = False
    max_split_size: Annotated[int, Meta(ge=-1, lt=2**62)] = -1

    def spelled(self) -> str:
        """As in PYTORCH_CUDA_ALLOC_CONF, which some snapshots leave empty."""
        if conf := self.conf or self.new_conf:
            return conf
        split = f"max_split_size_mb:{self.max_split_size >> 20}" if self.max_split_size > 0 else ""
        return ",".join(filter(None, ("expandable_segments:True" * self.expandable_segments, split)))


@dataclass(frozen=True, slots=True)
class Traced:
    """An event, and the call stack it came from as it stands in the file."""

    event: SnapshotEvent
    frames: object


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole file: the segments at its end, for each device what happened before, and the settings."""

    segments: tuple[SnapshotSegment, ...]
    traces: tuple[tuple[Traced, ...], ...]
    settings: str = ""


def parse(value: object) -> Snapshot:
    """The snapshot in a decoded pickle, or BadInput at the first malformed record."""
    if not isinstance(value, Mapping) or not {"segments", "device_traces"} & value.keys():
        raise BadInput("is a pickle without segments and device_traces: no memory snapshot", where="byte 0")
    segments = _listed(value.get("segments", []), "segments")
    traces = [
        _listed(trace, f"device_traces[{device}]")
        for device, trace in enumerate(_listed(value.get("device_traces", []), "device_traces"))
    ]
    blocks = sum(len(_listed(_field(segment, "blocks"), "segments")) for segment in segments)
    if blocks + sum(map(len, traces)) > MOST_EVENTS:
        raise BadInput(f"more than {MOST_EVENTS:,} events and blocks", where="device_traces")
    _refuse_repeats(segments, "segments")
    _refuse_repeats([event for trace in traces for event in trace], "device_traces")
    return Snapshot(
        tuple(_typed(segment, SnapshotSegment, f"segments[{at}]") for at, segment in enumerate(segments)),
        tuple(_trace(trace, f"device_traces[{device}]") for device, trace in enumerate(traces)),
        _typed(_field(value, "allocator_settings") or {}, SnapshotSettings, "allocator_settings").spelled(),
    )


def _refuse_repeats(records: Sequence[object], where: str) -> None:
    """Call stacks are shared, events and segments are not: a file is never much smaller than its content."""
    if len({id(record) for record in records}) < len(records):
        raise BadInput("one record stands here several times", where=where)


def _trace(entries: Sequence[object], where: str) -> tuple[Traced, ...]:
    return tuple(
        Traced(_typed(entry, SnapshotEvent, f"{where}[{at}]"), _field(entry, "frames"))
        for at, entry in enumerate(entries)
    )


def frames_in(value: object, frame_of: "Once[SnapshotFrame]") -> tuple[SnapshotFrame, ...]:
    """A call stack, the innermost call first."""
    stack = _listed(value, "frames")
    if len(stack) > MOST_FRAMES:
        raise BadInput(f"a call stack of {len(stack):,} calls, more than {MOST_FRAMES:,}", where="frames")
    return tuple(frame_of(frame, "frames") for frame in stack)


def _listed(value: object, where: str) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise BadInput(f"{type(value).__name__} where a list should be", where=where)
    return value


def _field(record: object, key: str) -> object:
    """A field that is looked at apart; a list where the record has none."""
    return record.get(key, []) if isinstance(record, Mapping) else []


Record = TypeVar("Record")


class Once(Generic[Record]):
    """Makes records of one kind; a value that the file refers to many times is looked at once.

    The values live as long as the decoded file does, so that each is known by its identity.
    """

    def __init__(self, kind: type[Record]) -> None:
        self._kind = kind
        self._made: dict[int, Record] = {}

    def __call__(self, value: object, where: str) -> Record:
        made = self._made.get(id(value))
        if made is None:
            made = self._made[id(value)] = _typed(value, self._kind, where)
        return made


def _typed(value: object, kind: type[Record], where: str) -> Record:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        raise BadInput(what, where=f"{where}{path.rstrip('`')}") from None
    except RecursionError:
        raise BadInput("nested deeper than any snapshot", where=where) from None
