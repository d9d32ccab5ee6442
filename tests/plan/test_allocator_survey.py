"""Snapshots that people bring: rewound to their start, replayed to the byte, and surveyed."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from stowplan.api import heap_of
from stowplan.cli.main import main
from stowplan.formats import stow, torch_snapshot
from stowplan.ir.heap import HeapAction, HeapBlock, HeapEvent, HeapSegment, HeapTrace
from stowplan.plan.allocator.caching import CachingAllocator
from stowplan.plan.allocator.replay import replay
from stowplan.plan.allocator.settings import MIB, AllocatorSettings, parse_settings
from stowplan.plan.allocator.survey import HeapSurvey, segments_before
from tests.support.cuda_traces import FOLDER, read_trace
from tests.support.heap_streams import random_size
from tests.support.snapshots import pickled, snapshot_of


def surveyed(events: list[HeapEvent], after: tuple[HeapSegment, ...], conf: str = "") -> HeapSurvey:
    survey = heap_of(torch_snapshot.read(pickled(snapshot_of(events, after, conf))))
    assert survey is not None
    return survey


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name.partition(".")[0])
@pytest.mark.slow
def test_a_recorded_trace_is_rewound_to_its_start(path: Path) -> None:
    trace = read_trace(path)
    after = replay(trace.before, trace.events).segments
    rewound = segments_before(HeapTrace(trace.events, after), AllocatorSettings())
    assert trace.layout_of(rewound) == trace.layout_of(trace.before)
    followed = replay(rewound, trace.events)
    assert (followed.misplaced, followed.segment_faults, followed.unmatched) == (0, 0, 0)


def recorded(seed: int, conf: str) -> tuple[list[HeapEvent], tuple[HeapSegment, ...]]:
    """Random requests on two streams, and the trace that PyTorch would show of their second half."""
    random, events, living = Random(seed), list[HeapEvent](), dict[int, tuple[int, int]]()
    allocator = CachingAllocator(parse_settings(conf), observe=events.append)
    for number in range(240):
        if number == 120:
            events.clear()
        if number == 200:
            allocator.empty_cache()
        if living and random.random() < 0.5:
            address = random.choice(sorted(living))
            allocator.free(address)
            events.append(HeapEvent(HeapAction.FREE, address, *living.pop(address)))
        else:
            size, stream = random_size(random), random.randrange(2)
            address = allocator.malloc(size, stream)
            living[address] = (size, stream)
            events.append(HeapEvent(HeapAction.ALLOC, address, size, stream))
    return events, allocator.segments()


@pytest.mark.parametrize("seed", range(4))
def test_the_second_half_of_a_history_is_followed(seed: int) -> None:
    events, after = recorded(seed, "")
    survey = surveyed(events, after)
    assert survey.followed is not None
    assert survey.followed.segments == tuple(replace(segment, pool=0) for segment in after)
    assert (survey.followed.misplaced, survey.followed.unmatched) == (0, 0)
    assert survey.reserved_bytes == sum(segment.nbytes for segment in after)
    free = survey.reserved_bytes - survey.allocated_bytes
    assert survey.pinned_bytes + survey.releasable_bytes == free


def test_expandable_snapshots_are_run_from_a_new_start() -> None:
    events, after = recorded(5, "expandable_segments:True")
    survey = surveyed(events, after, "expandable_segments:True")
    assert survey.followed is None
    assert "expandable" in survey.not_followed
    assert survey.outcomes[0].settings == "expandable_segments:True"
    assert survey.peaks == survey.outcomes[0].figures


@pytest.mark.parametrize(
    ("settings", "spelled"),
    [
        ({}, ""),
        ({"PYTORCH_CUDA_ALLOC_CONF": None, "max_split_size": -1}, ""),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "expandable_segments:True"),
        (
            {"expandable_segments": True, "max_split_size": 64 * MIB},
            "expandable_segments:True,max_split_size_mb:64",
        ),
    ],
)
def test_settings_are_read_however_they_are_recorded(settings: dict[str, object], spelled: str) -> None:
    snapshot = {**snapshot_of(*recorded(6, "")), "allocator_settings": settings}
    heap = torch_snapshot.read(pickled(snapshot)).heap
    assert heap is not None
    assert heap.settings == spelled


def test_settings_that_nobody_knows_are_told() -> None:
    survey = surveyed(*recorded(6, ""), "backend:cudaMallocAsync")
    assert survey.followed is None
    assert "cudaMallocAsync" in survey.not_followed


def small_snapshot() -> bytes:
    """A block of 2 MiB that pins a segment of 20, and a segment of 32 MiB that is wholly free."""
    events: list[HeapEvent] = []
    allocator = CachingAllocator(observe=events.append)
    for size in (2 * MIB - 100, 5 * MIB, 32 * MIB):
        address = allocator.malloc(size)
        events.append(HeapEvent(HeapAction.ALLOC, address, size))
        if size != 2 * MIB - 100:
            allocator.free(address)
            events.append(HeapEvent(HeapAction.FREE, address, size))
    return pickled(snapshot_of(events, allocator.segments()))


def test_inspect_tells_what_pins_a_segment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(small_snapshot())
    assert main(["inspect", str(path), "--json"]) == 0
    heap = json.loads(capsys.readouterr().out)["heap"]
    assert heap["at_end"] == {
        "requested_bytes": 2 * MIB - 100,
        "allocated_bytes": 2 * MIB,
        "reserved_bytes": 52 * MIB,
        "releasable_bytes": 32 * MIB,
        "pinned_bytes": 18 * MIB,
    }
    assert [(pin["bytes"], pin["free_bytes"]) for pin in heap["pins"]] == [(20 * MIB, 18 * MIB)]
    assert heap["pins"][0]["blocks"][0]["made_by"] == "forward at train.py:12"
    assert heap["peaks"]["reserved_peak_bytes"] == 52 * MIB
    assert heap["replay"] == {"requests": 3, "misplaced": 0, "segment_faults": 0, "unmatched": 0}
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "18.0 MiB pinned, 32.0 MiB releasable" in shown
    assert "expandable_segments:True" in shown


def test_a_heap_survives_the_own_format() -> None:
    document = torch_snapshot.read(small_snapshot())
    assert document.heap is not None
    assert stow.read(stow.write(document)).heap == document.heap


def test_blocks_that_do_not_tile_are_noted_and_not_replayed() -> None:
    events, after = recorded(1, "")
    odd = after[0].blocks[0]
    broken = replace(after[0], blocks=(HeapBlock(odd.address + 512, *odd[1:]), *after[0].blocks[1:]))
    document = torch_snapshot.read(pickled(snapshot_of(events, (broken, *after[1:]))))
    assert document.heap is None
    assert heap_of(document) is None
    assert any("do not tile" in note.what for note in document.notes)


def test_a_trace_that_contradicts_itself_is_counted() -> None:
    events, after = recorded(2, "")
    twice = [HeapEvent(HeapAction.FREE, 2**50, 512), *events]
    survey = surveyed(twice, after)
    assert survey.followed is not None
    assert survey.followed.unmatched == 1
