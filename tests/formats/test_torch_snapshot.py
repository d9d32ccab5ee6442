"""Memory snapshots: any history of allocations is told exactly, and no pickle gets to run anything."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stowplan.analyse.inspection import inspection_of
from stowplan.analyse.timeline import recorded_arena, timeline_of
from stowplan.errors import BadInput
from stowplan.formats.door import read_document
from stowplan.formats.torch_snapshot import read, recognise
from stowplan.ir import Kind, Phase

SAMPLE = Path(__file__).parent / "samples" / "torch_snapshot.pickle"
BASE = 0x7F0000000000


def event(action: str, slot: int, size: int, time: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"action": action, "addr": BASE + slot * 2**20, "size": size, "time_us": time, "frames": frames}


@st.composite
def histories(draw: st.DrawFn) -> tuple[dict[str, Any], list[int]]:
    """A snapshot as PyTorch writes one, and the bytes allocated after each event that changed them."""
    stacks = [[{"filename": "train.py", "line": line, "name": "forward"}] for line in range(3)]
    before = draw(st.dictionaries(st.integers(0, 7), st.integers(1, 10**6), max_size=4))
    living, trace, totals = dict(before), list[dict[str, Any]](), [sum(before.values())]
    for time in range(draw(st.integers(0, 20))):
        slot, frames = draw(st.integers(0, 7)), draw(st.sampled_from(stacks))
        if slot in living:
            size = living.pop(slot)
            trace += [event(word, slot, size, time, frames) for word in ("free_requested", "free_completed")]
        else:
            size = living[slot] = draw(st.integers(1, 10**6))
            trace.append(event("alloc", slot, size, time, frames))
        totals.append(sum(living.values()))
    blocks = [
        {"address": BASE + slot * 2**20, "size": 2**20, "requested_size": size, "state": "active_allocated"}
        for slot, size in living.items()
    ]
    segments = [{"device": 0, "address": BASE, "total_size": 2**23, "blocks": blocks}]
    return {"segments": segments, "device_traces": [trace]}, totals


@given(histories(), st.integers(2, pickle.HIGHEST_PROTOCOL))
@settings(max_examples=200)
@pytest.mark.slow
def test_the_curve_is_the_history(history: tuple[dict[str, Any], list[int]], protocol: int) -> None:
    snapshot, totals = history
    document = read(pickle.dumps(snapshot, protocol))
    inspection = inspection_of(document)
    assert inspection.facts.peak.bytes == max(totals)
    held = sum(document.graph.tensors[name].nbytes or 0 for name in document.graph.held)
    assert held == totals[-1]
    assert inspection.addresses is not None
    assert not inspection.addresses.overlaps


def test_the_sample_tells_where_memory_was_taken() -> None:
    document = read_document(SAMPLE)
    convolution, *_, backward = (op for op in document.graph.ops if op.outputs)
    assert (convolution.type, convolution.source) == ("_conv_forward", "train.py:12")
    assert backward.phase is Phase.BACKWARD
    kinds = [tensor.kind for tensor in document.graph.tensors.values()]
    assert kinds.count(Kind.INPUT) == 2  # one block still there, one given back during the trace
    assert document.counts["segment_bytes"] == 2**21


class Burglar:
    """What a pickle would run if it were loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_code_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    data = pickle.dumps({"segments": [Burglar(tmp_path / "in")], "device_traces": []}, protocol)
    assert recognise(data)
    with pytest.raises(BadInput, match="would run code") as caught:
        read(data)
    assert caught.value.where.startswith("byte ")
    assert not (tmp_path / "in").exists()


@pytest.mark.slow
def test_shared_values_do_not_multiply() -> None:
    """A few kilobytes that stand for ten to the eighteen events."""
    events: list[Any] = [event("alloc", 0, 1, 0, [])] * 10**3
    nested: list[Any] = [events] * 10**6
    with pytest.raises(BadInput, match="more than 1,000,000 events"):
        read(pickle.dumps({"segments": [], "device_traces": nested}))
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(BadInput, match="device_traces"):
        read(pickle.dumps({"segments": [], "device_traces": loop}))


@pytest.mark.parametrize("value", [[], {}, {"weights": [1, 2]}, "text", 7])
def test_other_pickles_are_told_apart(value: object) -> None:
    with pytest.raises(BadInput, match="no memory snapshot"):
        read(pickle.dumps(value))


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"device_traces": [[{"action": "alloc", "addr": -1, "size": 1}]]}, "device_traces[0][0].addr"),
        ({"segments": [{"address": 0, "blocks": []}]}, "segments[0]"),
        ({"device_traces": 3}, "device_traces"),
    ],
)
def test_faults_are_placed(change: dict[str, Any], where: str) -> None:
    with pytest.raises(BadInput) as caught:
        read(pickle.dumps({"segments": [], "device_traces": [], **change}))
    assert caught.value.where == where


def test_busiest_device_is_shown_and_others_told() -> None:
    one, two, three = (event("alloc", 0, 10, 0, []) for _ in range(3))
    document = read(pickle.dumps({"segments": [], "device_traces": [[one], [two, three]]}))
    assert {op.device for op in document.graph.ops} == {"cuda:1"}
    assert any(note.where == "device_traces[0]" for note in document.notes)
    assert any("allocated twice" in note.what for note in document.notes)


def test_a_small_file_cannot_stand_for_a_large_one() -> None:
    """Call stacks are shared among events; events and segments are not."""
    frame = {"filename": "x.py", "line": 1, "name": "f"}
    event = {"action": "alloc", "addr": 1, "size": 4, "frames": [frame]}
    for snapshot, told in (
        ({"segments": [], "device_traces": [[event] * 1000]}, "several times"),
        ({"segments": [], "device_traces": [[{**event, "frames": [frame] * 10_001}]]}, "10,001 calls"),
    ):
        with pytest.raises(BadInput, match=told):
            read(pickle.dumps(snapshot, protocol=4))


def test_segments_last_from_when_they_are_taken_to_when_they_are_given_back() -> None:
    """One was there before and stays, one comes and goes, half of a mapped one is unmapped."""
    mib, frames = 2**20, list[dict[str, Any]]()
    trace = [
        event("alloc", 0, mib, 0, frames),  # op 1
        event("segment_alloc", 4, 2 * mib, 1, frames),
        event("alloc", 4, 2 * mib, 1, frames),  # op 2
        event("free_completed", 4, 2 * mib, 2, frames),
        event("segment_free", 4, 2 * mib, 2, frames),
        event("segment_map", 8, 4 * mib, 3, frames),
        event("alloc", 8, mib, 3, frames),  # op 3
        event("segment_unmap", 10, 2 * mib, 3, frames),
        event("segment_free", 16, mib, 4, frames),  # taken before the trace begins
        event("alloc", 1, mib, 5, frames),  # op 4
    ]
    segments = [
        {"device": 0, "address": BASE, "total_size": 2 * mib, "blocks": []},
        {"device": 0, "address": BASE + 8 * mib, "total_size": 2 * mib, "blocks": []},
    ]
    document = read(pickle.dumps({"segments": segments, "device_traces": [trace]}))
    assert document.allocation is not None
    found = [((at - BASE) // mib, size // mib, *when) for at, size, *when in document.allocation.segments]
    assert found == [(0, 2, 0, 4), (4, 2, 2, 2), (8, 2, 3, 4), (10, 2, 3, 3), (16, 1, 0, 3)]
    arena = recorded_arena(timeline_of(document.graph), document.allocation)
    assert arena.nbytes == 9 * mib  # without the gaps between segments
    assert [held.address // mib for held in arena.segments] == [0, 2, 4, 6, 8]
