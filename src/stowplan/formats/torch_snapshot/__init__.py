"""PyTorch's memory snapshots: what `torch.cuda.memory._dump_snapshot` pickles, read without unpickling."""

from stowplan.formats.checked import checked
from stowplan.formats.torch_snapshot.history import history_of
from stowplan.formats.torch_snapshot.plain_pickle import decode
from stowplan.formats.torch_snapshot.records import parse
from stowplan.ir import Document

FORMAT = "torch_snapshot"
_PROTOCOLS = range(2, 6)


def recognise(data: bytes) -> bool:
    """A pickle of a binary protocol."""
    return data[:1] == b"\x80" and len(data) > 1 and data[1] in _PROTOCOLS


def read(data: bytes) -> Document:
    """The allocations and frees of the busiest device in their order, with addresses and times."""
    snapshot = parse(decode(data))
    history, notes = history_of(snapshot)
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
    )
