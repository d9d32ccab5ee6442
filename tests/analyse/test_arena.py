"""Arenas: packed without overlap, or as a run recorded it."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from stowplan.analyse.packing import PackedBlock, overlapping
from stowplan.analyse.timeline import packed_arena, recorded_arena, timeline_of
from stowplan.formats.door import read_document
from tests.support.steps import training_step


def test_no_two_stays_of_a_packed_arena_meet() -> None:
    timeline = timeline_of(training_step(800))
    arena = packed_arena(timeline)
    stays = [PackedBlock(str(i), stay.nbytes, stay.first, stay.last) for i, stay in enumerate(timeline.stays)]
    aside = [PackedBlock(f"a{run}", timeline.runs[run].aside_bytes, run, run) for run in arena.aside_offsets]
    offsets = {str(i): offset or 0 for i, offset in enumerate(arena.offsets)}
    offsets |= {f"a{run}": offset for run, offset in arena.aside_offsets.items()}
    assert overlapping([*stays, *aside], offsets) is None
    assert max(offsets[block.id] + block.nbytes for block in (*stays, *aside)) == arena.nbytes
    assert arena.nbytes >= timeline.curve_bytes().max()


def test_recorded_addresses_keep_their_distances_within_what_is_touched(dump: Callable[[str], Path]) -> None:
    document = read_document(dump("megengine"))
    assert document.allocation is not None
    timeline = timeline_of(document.graph)
    arena = recorded_arena(timeline, document.allocation)
    places = [document.allocation.places[stay.tensor] for stay in timeline.stays]
    assert arena.recorded
    assert arena.nbytes == 102_443_008  # the bytes that the run touched
    ends = [(offset or 0) + size for offset, (_, size) in zip(arena.offsets, places, strict=True)]
    assert max(ends) == arena.nbytes
    by_address = sorted(zip(places, arena.offsets, strict=True))
    for ((one, size), at), ((other, _), at_other) in pairwise(by_address):
        assert (at_other or 0) - (at or 0) <= other - one
        if other <= one + size:
            assert (at_other or 0) - (at or 0) == other - one
