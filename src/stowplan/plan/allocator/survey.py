"""A survey of a snapshot: bytes requested, allocated and reserved, what pins segments, and other settings.

The segments before a trace, from those after it: its events undone from the last to the first.

A snapshot shows the segments at its end alone. A block that was freed in the trace is known by its requested
size. Its slack follows from its neighbours: the large heap has no block of 1 MiB or less, so a small gap
after a block belongs to it. Slack before a free block cannot be told from that, and counts as part of it.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from stowplan.errors import BadUse
from stowplan.ir import Document
from stowplan.ir.heap import BlockState, HeapAction, HeapBlock, HeapSegment, HeapTrace, fault_in
from stowplan.plan.allocator.caching import HeapFigures
from stowplan.plan.allocator.replay import Replay, cold_run, replay
from stowplan.plan.allocator.settings import SMALL_REQUEST, SMALL_SEGMENT, AllocatorSettings, parse_settings


def segments_before(trace: HeapTrace, settings: AllocatorSettings) -> tuple[HeapSegment, ...]:
    """The segments as they were before the first event; blocks in them are allocated or free."""
    segments = {segment.address: replace(segment, blocks=()) for segment in trace.after}
    final = {block.address: block for segment in trace.after for block in segment.blocks}
    living = {address: block for address, block in final.items() if block.state is not BlockState.FREE}
    for action, address, nbytes, stream in reversed(trace.events):
        match action:
            case HeapAction.ALLOC:
                living.pop(address, None)
            case HeapAction.FREE:
                size = settings.block_bytes(nbytes)
                living[address] = HeapBlock(address, size, nbytes, BlockState.ALLOCATED)
            case HeapAction.SEGMENT_ALLOC:
                segments.pop(address, None)
            case HeapAction.SEGMENT_FREE:
                segments[address] = HeapSegment(address, nbytes, nbytes == SMALL_SEGMENT, (), stream)
    return tuple(_filled(segments, living, settings))


def _filled(
    segments: Mapping[int, HeapSegment], living: Mapping[int, HeapBlock], settings: AllocatorSettings
) -> Iterator[HeapSegment]:
    """The segments with their blocks, and free blocks between them."""
    starts = sorted(living)
    for address in sorted(segments):
        segment = segments[address]
        end = address + segment.nbytes
        blocks: list[HeapBlock] = []
        here = starts[bisect_left(starts, address) : bisect_left(starts, end)]
        at = address
        for start, after in pairwise((*here, end)):
            if start > at:
                blocks.append(HeapBlock(at, start - at, 0, BlockState.FREE))
            block = living[start]
            size = _with_slack(block, after - start, settings, is_small=segment.is_small)
            blocks.append(block._replace(nbytes=size, state=BlockState.ALLOCATED))
            at = start + size
        if at < end:
            blocks.append(HeapBlock(at, end - at, 0, BlockState.FREE))
        yield replace(segment, blocks=tuple(blocks))


def _with_slack(block: HeapBlock, room: int, settings: AllocatorSettings, *, is_small: bool) -> int:
    """The bytes of a block in the room up to the next allocated one."""
    gap = room - block.nbytes
    whole = settings.max_split_bytes is not None and block.nbytes >= settings.max_split_bytes
    if gap < 0 or whole or (not is_small and gap <= SMALL_REQUEST and not settings.expandable_segments):
        return room
    return block.nbytes


ALTERNATIVES = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:8",
)
"""The settings that a survey compares, the defaults first."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A segment that cannot be released although most of it may be free, and the blocks that hold it.

    `made_by` says for each block which op allocated it and where in the code, "" if the trace began later.
    """

    segment: HeapSegment
    free_bytes: int
    blocks: tuple[HeapBlock, ...]  # largest first
    made_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SettingsOutcome:
    """What some settings give for the same requests, on a device that is never full."""

    settings: str
    figures: HeapFigures


@dataclass(frozen=True, slots=True)
class HeapSurvey:
    """Figures at the end of a trace and at its peaks.

    The free bytes at the end are either in segments that are wholly free and would be released under
    pressure, or pinned by blocks in the same segment. `followed` is the replay at the recorded addresses.
    Where the model cannot follow them, it is None, `not_followed` says why, and the peaks are those of the
    first of `outcomes`, which begin with the recorded settings if the model knows them.
    """

    settings: str
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    releasable_bytes: int
    pinned_bytes: int
    pins: tuple[Pin, ...]  # most free bytes first
    followed: Replay | None
    not_followed: str
    outcomes: tuple[SettingsOutcome, ...]

    @property
    def peaks(self) -> HeapFigures:
        """The figures of the replay, or those of the recorded settings from a new start."""
        return self.followed.figures if self.followed else self.outcomes[0].figures


def survey_of(document: Document) -> HeapSurvey | None:
    """Replay the requests of a snapshot at its own settings and at others; None for other documents."""
    trace = document.heap
    if trace is None:
        return None
    own, why_not = _own_settings(trace)
    before = segments_before(trace, own or AllocatorSettings())
    why_not = why_not or fault_in(HeapTrace((), before))
    blocks = [block for segment in trace.after for block in segment.blocks]
    allocated = [block for block in blocks if block.state is not BlockState.FREE]
    pins = sorted(_pins(document, trace), key=lambda pin: (-pin.free_bytes, pin.segment.address))
    free = sum(block.nbytes for block in blocks if block.state is BlockState.FREE)
    pinned = sum(pin.free_bytes for pin in pins)
    spelled = dict.fromkeys((*((trace.settings,) if own else ()), *ALTERNATIVES))
    return HeapSurvey(
        trace.settings,
        sum(block.requested_bytes for block in allocated),
        sum(block.nbytes for block in allocated),
        sum(segment.nbytes for segment in trace.after),
        free - pinned,
        pinned,
        tuple(pins),
        None if why_not else replay(before, trace.events, own),
        why_not,
        tuple(
            SettingsOutcome(text, cold_run(before, trace.events, parse_settings(text)).figures)
            for text in spelled
        ),
    )


def _own_settings(trace: HeapTrace) -> tuple[AllocatorSettings | None, str]:
    """The settings of a trace, if the model knows them, and the reason why it cannot be followed, if any."""
    try:
        settings = parse_settings(trace.settings)
    except BadUse as fault:
        return None, str(fault)
    if settings.expandable_segments or any(segment.is_expandable for segment in trace.after):
        return settings, "the mapping of expandable segments before the trace is not recorded"
    return settings, ""


def _pins(document: Document, trace: HeapTrace) -> Iterator[Pin]:
    """Segments with free and with other blocks."""
    makers = _makers(document)
    for segment in trace.after:
        free = sum(block.nbytes for block in segment.blocks if block.state is BlockState.FREE)
        held = [block for block in segment.blocks if block.state is not BlockState.FREE]
        if free and held:
            held.sort(key=lambda block: (-block.nbytes, block.address))
            yield Pin(segment, free, tuple(held), tuple(makers.get(block.address, "") for block in held))


def _makers(document: Document) -> dict[int, str]:
    """The op that last allocated at each address, and its line of code."""
    places = document.allocation.places if document.allocation else {}
    return {
        places[use.tensor][0]: f"{op.type} at {op.source}" if op.source else ""
        for op in document.graph.ops
        for use in op.outputs
        if use.tensor in places
    }
