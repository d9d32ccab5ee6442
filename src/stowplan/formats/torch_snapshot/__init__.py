"""PyTorch's memory snapshots: what `torch.cuda.memory._dump_snapshot` pickles, read without unpickling."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stowplan.formats.allocations import AllocationHistory, Work
from stowplan.formats.checked import checked
from stowplan.formats.torch_snapshot.plain_pickle import decode
from stowplan.formats.torch_snapshot.records import (
    Once,
    Snapshot,
    SnapshotEvent,
    SnapshotFrame,
    SnapshotSegment,
    Traced,
    frames_in,
    parse,
)
from stowplan.ir import Document, Interval, Note, NoteKind, Phase
from stowplan.ir.heap import BlockState, HeapAction, HeapBlock, HeapEvent, HeapSegment, HeapTrace, fault_in

FORMAT = "torch_snapshot"
_PROTOCOLS = range(2, 6)


def recognise(data: bytes) -> bool:
    """A pickle of a binary protocol."""
    return data[:1] == b"\x80" and len(data) > 1 and data[1] in _PROTOCOLS


def read(data: bytes) -> Document:
    """The allocations and frees of the busiest device in their order, with addresses and times."""
    snapshot = parse(decode(data))
    device = busiest_device_of(snapshot)
    history, notes = history_of(snapshot, device)
    heap = heap_of(snapshot, device)
    if heap and (fault := fault_in(heap)):
        notes.append(Note(NoteKind.ODD, "segments", f"{fault}: requests are not replayed"))
        heap = None
    return Document(
        FORMAT,
        checked(history.graph(), {}, otherwise="device_traces"),
        history.profile("host"),
        history.allocation(),
        notes=(*notes, *history.notes()),
        counts={
            "segments": len(snapshot.segments),
            "segment_bytes": sum(segment.total_size for segment in snapshot.segments),
            "events": sum(map(len, snapshot.traces)),
        },
        heap=heap,
    )


_ATEN_CALL = re.compile(r"at::_ops::(\w+)::")
_LIBRARY = "/torch/"
_TAKEN, _GIVEN_BACK = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
_FREED = "free_completed"  # a requested free is completed at once, or when the streams that use it are done


def busiest_device_of(snapshot: Snapshot) -> int:
    """The device with most events."""
    return max(range(len(snapshot.traces)), key=lambda number: len(snapshot.traces[number]), default=0)


_BLOCK_STATES = {"active_allocated": BlockState.ALLOCATED, "inactive": BlockState.FREE}  # others wait
_ACTIONS = {str(action): action for action in HeapAction}


def heap_of(snapshot: Snapshot, device: int) -> HeapTrace | None:
    """What the allocator of a device did, and the segments that it had at the end; None if it did nothing."""
    pools: dict[tuple[int, int], int] = {(0, 0): 0}
    segments = [segment for segment in snapshot.segments if segment.device == device]
    after = tuple(
        HeapSegment(
            segment.address,
            segment.total_size,
            segment.segment_type == "small",
            tuple(_heap_blocks(segment)),
            segment.stream,
            pools.setdefault(segment.segment_pool_id, len(pools)),
            segment.is_expandable,
        )
        for segment in segments
    )
    trace = snapshot.traces[device] if device < len(snapshot.traces) else ()
    events = tuple(
        HeapEvent(_ACTIONS[event.action], event.addr, event.size, event.stream)
        for event in (traced.event for traced in trace)
        if event.action in _ACTIONS and event.addr is not None
    )
    return HeapTrace(events, after, snapshot.settings) if events or after else None


def _heap_blocks(segment: SnapshotSegment) -> Iterator[HeapBlock]:
    address = segment.address
    for block in segment.blocks:
        address = address if block.address is None else block.address
        state = _BLOCK_STATES.get(block.state, BlockState.WAITING)
        known = block.size if block.requested_size is None else block.requested_size
        yield HeapBlock(address, block.size, 0 if state is BlockState.FREE else known, state)
        address += block.size


def history_of(snapshot: Snapshot, device: int) -> tuple[AllocationHistory, list[Note]]:
    """The history of one device, and notes on the others."""
    traces = snapshot.traces or ((),)
    history = AllocationHistory(f"cuda:{device}")
    segments = [segment for segment in snapshot.segments if segment.device == device]
    _place_what_was_there(history, segments, traces[device])
    _replay(history, traces[device])
    for segment in segments:
        history.had(segment.address, segment.total_size)
    others = [number for number, trace in enumerate(traces) if trace and number != device]
    return history, [_left_out(number, len(traces[number])) for number in others]


def _left_out(device: int, events: int) -> Note:
    return Note(NoteKind.ODD, f"device_traces[{device}]", f"{events} events of another device are not shown")


def _place_what_was_there(
    history: AllocationHistory, segments: Sequence[SnapshotSegment], trace: Sequence[Traced]
) -> None:
    """The blocks in use at the end that no event of the trace allocated."""
    history.enter(Work("snapshot", Phase.FORWARD))
    taken = {traced.event.addr for traced in trace if traced.event.action == "alloc"}
    for segment in segments:
        address = segment.address
        for block in segment.blocks:
            address = address if block.address is None else block.address
            if block.state.startswith("active") and address not in taken:
                size = block.size if block.requested_size is None else block.requested_size
                history.existed(address, size)
            address += block.size


def _replay(history: AllocationHistory, trace: Sequence[Traced]) -> None:
    stacks = _Stacks()
    began = trace[0].event.time_us if trace else 0
    for traced in trace:
        event = traced.event
        if event.addr is None:
            continue
        if event.action == "alloc":
            history.enter(stacks.work_of(traced.frames, (event.time_us - began) / 1e6))
            history.allocate(event.addr, event.size)
        elif event.action == _FREED:
            _free(history, event)
        elif event.action in _TAKEN:
            history.reserve(event.addr, event.size)
        elif event.action in _GIVEN_BACK:
            history.give_back(event.addr, event.size)


def _free(history: AllocationHistory, event: SnapshotEvent) -> None:
    assert event.addr is not None
    history.free(event.addr, event.size)


@dataclass(slots=True)
class _Stacks:
    """Call stacks that many events share: each is decoded once."""

    _seen: dict[int, tuple[str, Phase, str]] = field(default_factory=dict)
    _frame_of: Once[SnapshotFrame] = field(default_factory=lambda: Once(SnapshotFrame))

    def work_of(self, frames: object, seconds: float) -> Work:
        """The work that the innermost calls show."""
        known = self._seen.get(id(frames))
        if known is None:
            known = self._seen[id(frames)] = _described(frames_in(frames, self._frame_of))
        kind, phase, source = known
        return Work(kind, phase, source=source, interval=Interval(seconds, seconds, seconds))


def _described(frames: Sequence[SnapshotFrame]) -> tuple[str, Phase, str]:
    """The op's type, its phase, and the line of the user's code."""
    python = [frame for frame in frames if frame.filename.endswith(".py")]
    own = next((frame for frame in python if _LIBRARY not in frame.filename), python[0] if python else None)
    source = f"{own.filename}:{own.line}" if own else ""
    return _type_of(frames, python), _phase_of(frames), source


def _type_of(frames: Sequence[SnapshotFrame], python: Sequence[SnapshotFrame]) -> str:
    for frame in frames:
        if call := _ATEN_CALL.match(frame.name):
            return f"aten::{call[1]}"
    return python[0].name if python and python[0].name else "allocate"


def _phase_of(frames: Sequence[SnapshotFrame]) -> Phase:
    names = [frame.name for frame in frames]
    if any(name == "backward" or name.startswith("torch::autograd::Engine") for name in names):
        return Phase.BACKWARD
    if any(frame.name == "step" and "optim" in frame.filename for frame in frames):
        return Phase.UPDATE
    return Phase.FORWARD
