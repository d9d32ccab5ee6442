"""The model of the caching allocator: recorded traces to the byte, each rule, and laws on random streams."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stowplan.errors import BadUse, OutOfDeviceMemory
from stowplan.ir.heap import BlockState, HeapAction
from stowplan.plan.allocator.caching import NOTHING, CachingAllocator
from stowplan.plan.allocator.replay import cold_run, free_run, replay
from stowplan.plan.allocator.settings import MIB, AllocatorSettings, parse_settings, segment_bytes
from tests.support.cuda_traces import FOLDER, read_trace
from tests.support.heap_invariants import broken_invariants
from tests.support.heap_streams import run_stream

PEAKS = {  # MiB reserved at most, as PyTorch recorded it
    "gpt-128-training": 6900,
    "gpt-512-inference": 1890,
    "gradients-grad": 4234,
    "h100-gpt-ctx128-forward": 18756,
    "h100-gpt-ctx256-forward": 25316,
}


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name.partition(".")[0])
def test_a_trace_is_followed_to_the_byte(path: Path) -> None:
    trace = read_trace(path)
    followed = replay(trace.before, trace.events)
    assert followed.requests == sum(event.action is HeapAction.ALLOC for event in trace.events)
    assert (followed.misplaced, followed.segment_faults) == (0, 0)
    assert trace.layout_of(followed.segments) == trace.after
    assert followed.figures.reserved_peak_bytes == PEAKS[trace.name] * MIB
    own = free_run(trace.before, trace.events)
    assert own.figures.reserved_peak_bytes == PEAKS[trace.name] * MIB


@pytest.mark.slow
def test_a_replay_notices_another_allocator() -> None:
    trace = read_trace(FOLDER / "h100-gpt-ctx128-forward.json.gz")
    followed = replay(trace.before, trace.events, AllocatorSettings(roundup_power2_divisions=(2,)))
    assert followed.misplaced > 100
    assert followed.segment_faults > 0
    assert trace.layout_of(followed.segments) != trace.after


def test_expandable_segments_waste_less_on_a_recorded_step() -> None:
    trace = read_trace(FOLDER / "gpt-128-training.json.gz")
    default, expandable = (
        cold_run(trace.before, trace.events, AllocatorSettings(expandable_segments=answer)).figures
        for answer in (False, True)
    )
    assert default.requested_peak_bytes == expandable.requested_peak_bytes
    assert expandable.overhead < default.overhead


@given(st.integers(0, 2**32), st.integers(1, 50))
@settings(max_examples=100, deadline=None)
@pytest.mark.slow
def test_random_streams_keep_the_laws(seed: int, events: int) -> None:
    run_stream(seed, events, laws=True)


@pytest.mark.parametrize(
    ("requested", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (21 * MIB, 21 * MIB, 22 * MIB),
    ],
)
def test_sizes_of_blocks_and_segments(requested: int, block: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.malloc(requested)
    assert AllocatorSettings().block_bytes(requested) == block
    assert segment_bytes(block) == segment == allocator.figures().reserved_bytes


def test_nothing_is_taken_for_nothing() -> None:
    allocator = CachingAllocator()
    assert allocator.malloc(0) == NOTHING
    allocator.free(NOTHING)
    allocator.record_stream(NOTHING, 3)
    assert allocator.segments() == ()


def test_slack_counts_as_allocated() -> None:
    """12 MiB in a block of 13: the rest of 1 MiB is not split off."""
    allocator = CachingAllocator()
    first = allocator.malloc(13 * MIB)  # a segment of 14 MiB, whose rest of 1 MiB is slack
    allocator.free(first)
    assert allocator.malloc(13 * MIB) == first
    assert allocator.figures().allocated_bytes == 14 * MIB
    allocator.free(first)
    assert allocator.malloc(12 * MIB) == first
    assert allocator.figures().allocated_bytes == 12 * MIB  # more than 1 MiB is left: split


def test_best_fit_and_the_lowest_address_among_equals() -> None:
    allocator = CachingAllocator()
    a, _, b, _, c, _ = (allocator.malloc(size * MIB) for size in (3, 2, 2, 2, 2, 2))
    for address in (c, a, b):
        allocator.free(address)
    assert allocator.malloc(2 * MIB) == b
    assert allocator.malloc(2 * MIB) == c
    assert allocator.malloc(2 * MIB) == a  # 3 MiB are nearer than the 7 MiB at the end of the segment
    assert not broken_invariants(allocator)


def test_streams_and_pools_do_not_share_blocks() -> None:
    allocator = CachingAllocator()
    one = allocator.malloc(MIB, stream=1)
    allocator.free(one)
    assert allocator.malloc(MIB, stream=2) != one
    assert allocator.malloc(MIB, stream=1, pool=7) != one
    assert allocator.malloc(MIB, stream=1) == one


def test_a_recorded_stream_delays_reuse_until_its_events_pass() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(12 * MIB)
    allocator.record_stream(block, 1)
    allocator.record_stream(block, 2)
    allocator.free(block)
    assert (allocator.figures().allocated_bytes, allocator.figures().active_bytes) == (0, 12 * MIB)
    assert allocator.segments()[0].blocks[0].state is BlockState.WAITING
    allocator.pass_events(1)
    assert allocator.malloc(12 * MIB) != block  # stream 2 is not done
    allocator.pass_events(2)
    assert allocator.segments()[0].blocks[0].state is BlockState.WAITING  # nobody looked yet
    assert allocator.malloc(12 * MIB) == block
    allocator.record_stream(block, 0)  # its own stream
    allocator.free(block)
    assert allocator.figures().active_bytes == 12 * MIB


def test_events_of_a_stream_pass_in_order() -> None:
    allocator = CachingAllocator()
    first, second = allocator.malloc(12 * MIB), allocator.malloc(12 * MIB)
    for block in (first, second):
        allocator.record_stream(block, 1)
    allocator.free(first)
    allocator.pass_events(1)
    allocator.free(second)
    assert allocator.malloc(12 * MIB) == first
    assert allocator.malloc(12 * MIB) not in (first, second)


def test_what_is_free_is_released_before_memory_runs_out() -> None:
    allocator = CachingAllocator(AllocatorSettings(capacity_bytes=100 * MIB))
    kept, dropped = allocator.malloc(40 * MIB), allocator.malloc(40 * MIB)
    allocator.record_stream(dropped, 1)
    allocator.free(dropped)  # its event has not passed: the retry waits for it
    allocator.malloc(60 * MIB)
    assert (allocator.retries, allocator.figures().reserved_bytes) == (1, 100 * MIB)
    with pytest.raises(OutOfDeviceMemory) as caught:
        allocator.malloc(2 * MIB)
    assert (caught.value.requested_bytes, caught.value.limit_bytes) == (2 * MIB, 100 * MIB)
    assert "expandable_segments" in str(caught.value)
    allocator.free(kept)
    assert not broken_invariants(allocator)


def test_a_fraction_limits_reserved_bytes() -> None:
    allocator = CachingAllocator(AllocatorSettings(capacity_bytes=100 * MIB, fraction=0.5))
    allocator.malloc(40 * MIB)
    with pytest.raises(OutOfDeviceMemory):
        allocator.malloc(12 * MIB)
    allocator.malloc(10 * MIB)


def test_callbacks_are_asked_before_the_device() -> None:
    held: list[int] = []

    def give_up() -> bool:
        freed = bool(held)
        while held:
            allocator.free(held.pop())
        return freed

    allocator = CachingAllocator(callbacks=(give_up,))
    held.append(block := allocator.malloc(12 * MIB))
    assert allocator.malloc(12 * MIB) == block
    assert allocator.figures().reserved_bytes == 12 * MIB


def test_a_split_size_keeps_large_blocks_whole() -> None:
    allocator = CachingAllocator(parse_settings("max_split_size_mb:32"))
    large = allocator.malloc(64 * MIB)
    allocator.free(large)
    assert allocator.malloc(16 * MIB) != large  # smaller requests leave large blocks alone
    assert allocator.malloc(40 * MIB) != large  # 64 >= 40 + 20 MiB
    assert allocator.malloc(48 * MIB) == large
    assert allocator.segments()[0].blocks[0].nbytes == 64 * MIB  # not split


def test_oversize_blocks_are_released_for_a_request() -> None:
    allocator = CachingAllocator(parse_settings("max_split_size_mb:32", capacity_bytes=140 * MIB))
    small, first, second = (allocator.malloc(size * MIB) for size in (12, 60, 60))
    for block in (small, first, second):
        allocator.free(block)
    allocator.malloc(100 * MIB)
    assert allocator.retries == 0  # two oversize blocks were enough, the small segment is still there
    assert allocator.figures().reserved_bytes == 112 * MIB


def test_garbage_collection_releases_old_segments() -> None:
    text = "garbage_collection_threshold:0.5"
    allocator = CachingAllocator(parse_settings(text, capacity_bytes=128 * MIB, fraction=1.0))
    old, new = allocator.malloc(30 * MIB), allocator.malloc(24 * MIB)
    allocator.free(old)
    allocator.malloc(12 * MIB, stream=1)
    allocator.free(new)
    allocator.malloc(40 * MIB)
    assert allocator.retries == 0
    assert [segment.nbytes // MIB for segment in allocator.segments()] == [24, 12, 40]


def test_expandable_segments_grow_in_place() -> None:
    allocator = CachingAllocator(parse_settings("expandable_segments:True", capacity_bytes=2**30))
    first = allocator.malloc(12 * MIB)
    assert allocator.figures().reserved_bytes == 20 * MIB
    second = allocator.malloc(30 * MIB)  # 8 MiB are free behind the first: 22 more take two pages
    assert second == first + 12 * MIB
    assert allocator.figures().reserved_bytes == 60 * MIB
    allocator.malloc(512)
    assert allocator.figures().reserved_bytes == 62 * MIB
    allocator.free(first)
    allocator.empty_cache()  # the first page is used from 12 MiB on, the last one has room
    assert allocator.figures().reserved_bytes == 62 * MIB
    allocator.free(second)
    third = allocator.malloc(80 * MIB)
    assert third == first
    assert not broken_invariants(allocator)
    allocator.free(third)
    allocator.empty_cache()
    assert allocator.figures().reserved_bytes == 2 * MIB


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max_split_size_mb:19", "at least 20"),
        ("max_split_size_mb:lots", "lots"),
        ("garbage_collection_threshold:1.5", "garbage_collection_threshold"),
        ("roundup_power2_divisions:3", "powers of two"),
        ("expandable_segments:yes", "yes"),
        ("expandable_segments", "NAME:VALUE"),
        ("colour:blue", "colour"),
        ("backend:cudaMallocAsync", "native"),
    ],
)
def test_bad_settings_are_named(text: str, told: str) -> None:
    with pytest.raises(BadUse, match=told):
        parse_settings(text)


def test_settings_are_spelled_as_in_pytorch() -> None:
    text = (
        "expandable_segments:True, roundup_power2_divisions:[256:1,512:2,>:4],pinned_num_register_threads:8"
    )
    found = parse_settings(text)
    assert found.expandable_segments
    assert found.roundup_power2_divisions == (*[1] * 9, 2, *[4] * 6)
    assert found.block_bytes(600 * MIB + 1) == 768 * MIB
    assert found.block_bytes(1100 * MIB) == 1280 * MIB
    assert parse_settings("").block_bytes(600 * MIB + 1) == 600 * MIB + 512


@pytest.mark.parametrize("address", [17, -2])
def test_an_address_that_was_not_handed_out_is_refused(address: int) -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(600)
    allocator.free(block)
    for wrong in (address, block):
        with pytest.raises(BadUse, match="no allocated block"):
            allocator.free(wrong)
