"""Recorded traces of the caching allocator: segments before, events, segments after."""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

from stowplan.ir.heap import BlockState, HeapAction, HeapBlock, HeapEvent, HeapSegment

FOLDER = Path(__file__).parents[1] / "data" / "cuda_traces"

_ACTIONS = {
    "alloc": HeapAction.ALLOC,
    "free": HeapAction.FREE,
    "segment_alloc": HeapAction.SEGMENT_ALLOC,
    "segment_free": HeapAction.SEGMENT_FREE,
}


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """One file. `after` has for each segment its address and its blocks as (bytes, allocated)."""

    name: str
    before: tuple[HeapSegment, ...]
    events: tuple[HeapEvent, ...]
    after: dict[int, tuple[tuple[int, bool], ...]]

    def layout_of(self, segments: tuple[HeapSegment, ...]) -> dict[int, tuple[tuple[int, bool], ...]]:
        """Segments as `after` has them."""
        return {
            segment.address: tuple(
                (block.nbytes, block.state is BlockState.ALLOCATED) for block in segment.blocks
            )
            for segment in segments
        }


def read_trace(path: Path) -> RecordedTrace:
    """A trace from its file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        content = json.load(file)
    before = tuple(
        HeapSegment(address, size, pool == "small", tuple(_block(*block) for block in blocks))
        for address, size, pool, blocks in content["segments_before"]
    )
    events = tuple(HeapEvent(_ACTIONS[kind], address, size) for kind, address, size in content["events"])
    after = {
        address: tuple((size, allocated) for size, allocated in blocks)
        for address, _, _, blocks in content["segments_after"]
    }
    return RecordedTrace(path.name.removesuffix(".json.gz"), before, events, after)


def _block(address: int, size: int, allocated: bool) -> HeapBlock:
    return HeapBlock(address, size, size * allocated, BlockState.ALLOCATED if allocated else BlockState.FREE)
