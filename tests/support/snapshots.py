"""Memory snapshots as PyTorch pickles them, written from a heap."""

import pickle
from collections.abc import Sequence
from typing import Any

from stowplan.ir.heap import BlockState, HeapAction, HeapEvent, HeapSegment

_STATES = {
    BlockState.ALLOCATED: "active_allocated",
    BlockState.WAITING: "active_pending_free",
    BlockState.FREE: "inactive",
}


def snapshot_of(events: Sequence[HeapEvent], after: Sequence[HeapSegment], conf: str = "") -> dict[str, Any]:
    """The dict that `torch.cuda.memory._snapshot` returns, with one stack for all events."""
    frames = [{"filename": "train.py", "line": 12, "name": "forward"}]
    trace = []
    for time, event in enumerate(events):
        words = ("free_requested", event.action) if event.action is HeapAction.FREE else (event.action,)
        trace += [
            {
                "action": str(word),
                "addr": event.address,
                "size": event.nbytes,
                "stream": event.stream,
                "time_us": time,
                "frames": frames,
            }
            for word in words
        ]
    settings = {"PYTORCH_CUDA_ALLOC_CONF": conf, "max_split_size": -1, "expandable_segments": False}
    segments = [_segment(segment) for segment in after]
    return {"segments": segments, "device_traces": [trace], "allocator_settings": settings}


def _segment(segment: HeapSegment) -> dict[str, Any]:
    return {
        "device": 0,
        "address": segment.address,
        "total_size": segment.nbytes,
        "stream": segment.stream,
        "segment_type": "small" if segment.is_small else "large",
        "segment_pool_id": (0, segment.pool),
        "is_expandable": segment.is_expandable,
        "blocks": [
            {
                "address": block.address,
                "size": block.nbytes,
                "requested_size": block.requested_bytes,
                "state": _STATES[block.state],
                "frames": [],
            }
            for block in segment.blocks
        ],
    }


def pickled(snapshot: dict[str, Any]) -> bytes:
    """As `torch.cuda.memory._dump_snapshot` writes it."""
    return pickle.dumps(snapshot, protocol=4)
