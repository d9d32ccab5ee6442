"""Plans through the caching allocator: the simulator's requested peak, and a budget of reserved bytes."""

import json
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from stowplan import Search
from stowplan.analyse.timeline import Doing
from stowplan.api import reserved_in_turn
from stowplan.cli.main import main
from stowplan.errors import BudgetTooSmall, OutOfDeviceMemory
from stowplan.ir import Graph
from stowplan.plan.allocator.caching import CachingAllocator
from stowplan.plan.allocator.held_blocks import held_amid
from stowplan.plan.allocator.placed import placed_by_allocator
from stowplan.plan.allocator.projection import begun, plan_for_device, project, project_in_turn
from stowplan.plan.allocator.requests import Requests, requests_of
from stowplan.plan.allocator.settings import MIB, AllocatorSettings, parse_settings
from stowplan.plan.explain.timeline import timeline_of_plan
from stowplan.plan.options import PlanOptions
from stowplan.plan.plan import Plan
from stowplan.plan.planner import Planner
from stowplan.plan.steps import Store
from tests.support.plans import moved
from tests.support.steps import random_step, uneven_prices

DEFAULTS = AllocatorSettings()
SAMPLE = Path(__file__).parents[1] / "formats" / "samples" / "text.txt"


def grown(graph: Graph, times: int) -> Graph:
    """The graph with each tensor so many times as large."""
    tensors = {
        name: replace(tensor, nbytes=(tensor.nbytes or 0) * times, shape=None, dtype=None)
        for name, tensor in graph.tensors.items()
    }
    return replace(graph, tensors=tensors)


def planner_of_step(seed: int, times: int = 1) -> Planner:
    graph = grown(random_step(seed, layers=7), times)
    return Planner.of(graph, uneven_prices(graph, seed), options=PlanOptions(search=Search(moves=40)))


def plans(planner: Planner) -> list[Plan]:
    low, high = planner.minimum_bytes, planner.plain_peak_bytes
    return [planner.plan(low + (high - low) * share // 2) for share in range(3)]


def live_peak(requests: Requests) -> int:
    """The most that is requested at once, without an allocator."""
    sizes: dict[int, int] = {}
    peak = 0
    for block, nbytes in (*requests.before, *requests.iteration):
        if nbytes:
            assert block not in sizes
            sizes[block] = nbytes
        else:
            del sizes[block]
        peak = max(peak, sum(sizes.values()))
    assert set(sizes) == {block for block, _ in requests.before}  # an iteration leaves what it found
    return peak


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.slow
def test_requests_add_up_to_the_projected_peak(seed: int) -> None:
    for plan in plans(planner_of_step(seed)):
        for each in (plan, moved(plan)):
            assert live_peak(requests_of(each)) == each.projected_peak_bytes
            heap = project(each, DEFAULTS, repair=False)
            figures = heap.figures
            assert figures.requested_peak_bytes == each.projected_peak_bytes
            assert figures.requested_peak_bytes <= figures.allocated_peak_bytes <= heap.floor_bytes
            assert heap.floor_bytes <= figures.reserved_peak_bytes == heap.unrepaired_bytes


def test_tensors_lie_apart_in_the_segments_of_a_device() -> None:
    plan = plans(planner_of_step(1, times=20_003))[0]
    arena, stays = placed_by_allocator(plan, DEFAULTS), timeline_of_plan(plan).stays
    assert len(arena.segments) > 2
    assert arena.nbytes == sum(each.nbytes for each in arena.segments)
    assert arena.nbytes == project(plan, DEFAULTS).figures.reserved_peak_bytes
    placed = [(stay, at) for stay, at in zip(stays, arena.offsets, strict=True) if at is not None]
    assert len(placed) == sum(stay.nbytes > 0 for stay in stays)
    for stay, at in placed:
        inside = [s for s in arena.segments if s.address <= at and at + stay.nbytes <= s.address + s.nbytes]
        assert len(inside) == 1
    for (one, low), (other, high) in combinations(sorted(placed, key=lambda place: place[1]), 2):
        meet = one.first <= other.last and other.first <= one.last and one.place != other.place
        assert not meet or low + one.nbytes <= high


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow
def test_a_held_segment_never_reserves_more(seed: int) -> None:
    for plan in plans(planner_of_step(seed, times=1_000_003)):
        heap = project(plan, DEFAULTS)
        assert heap.figures.requested_peak_bytes == plan.projected_peak_bytes
        assert heap.floor_bytes <= heap.figures.reserved_peak_bytes <= heap.unrepaired_bytes
        assert heap.held_segments or heap.figures.reserved_peak_bytes == heap.unrepaired_bytes
        assert heap.fragmentation_bytes == heap.figures.reserved_peak_bytes - plan.projected_peak_bytes


def test_several_held_segments_reserve_less_than_one() -> None:
    plan = plans(planner_of_step(3, times=1_000_003))[0]
    one, several = (
        project(plan, DEFAULTS, enough_bytes=1),
        project(plan, DEFAULTS),
    )  # 1: more would be in vain
    assert len(one.held_segments) == 1 < len(several.held_segments)
    assert several.figures.reserved_peak_bytes < 0.9 * one.figures.reserved_peak_bytes
    allocator = CachingAllocator()
    for address in [allocator.malloc(nbytes) for nbytes in several.held_segments]:
        allocator.free(address)
    assert allocator.reserved_bytes == sum(several.held_segments) <= several.figures.reserved_peak_bytes


@pytest.mark.parametrize(("seed", "kind"), [(1, Plan), (2, Plan), (4, Store)])
def test_held_blocks_let_a_plan_reserve_what_no_placement_passes(seed: int, kind: type) -> None:
    plan = plans(planner_of_step(seed, times=1_000_003))[0]
    plan = moved(plan) if kind is Store else plan
    heap = project(plan, DEFAULTS, repair=False, held_blocks=True)
    assert heap.figures.reserved_peak_bytes <= 1.001 * heap.floor_bytes < 0.9 * heap.unrepaired_bytes
    assert heap.figures.requested_peak_bytes == plan.projected_peak_bytes
    assert heap.held_blocks is not None
    assert heap.held_segments == (heap.held_blocks.segment_bytes,)
    requests = requests_of(plan)
    among = heap.held_blocks.among(requests)
    known = {block for block, _ in (*requests.before, *requests.iteration)}
    assert tuple(each for each in among.iteration if each.block in known) == requests.iteration
    runs = timeline_of_plan(plan).runs
    for number, (first, last) in enumerate(pairwise((*among.runs, len(among.iteration)))):
        held = [each for each in among.iteration[first:last] if each.block not in known]
        assert not held or runs[number].doing in (Doing.COMPUTE, Doing.RECOMPUTE)
        assert sorted(block for block, n in held if n) == sorted(block for block, n in held if not n)


@pytest.mark.parametrize("seed", [1, 2])
def test_blocks_are_held_around_what_others_have(seed: int) -> None:
    plan = plans(planner_of_step(seed, times=1_000_003))[0]
    planned = project(plan, DEFAULTS, repair=False, held_blocks=True).held_blocks
    assert planned is not None
    requests, theirs, reserved = requests_of(plan, enlarged=planned.enlarged), 40 * MIB, list[int]()
    for is_seen in (True, False):
        allocator, addresses = begun(requests, DEFAULTS, [planned.segment_bytes + 2 * theirs])
        spacer = allocator.malloc(theirs)
        allocator.malloc(theirs)
        allocator.free(spacer)
        segments = allocator.segments()
        held = replace(planned, by_run=held_amid(plan, planned, segments)) if is_seen else planned
        for block, nbytes in held.among(requests).iteration * 3:
            if nbytes:
                addresses[block] = allocator.malloc(nbytes)
            else:
                allocator.free(addresses[block])
        reserved.append(allocator.reserved_bytes - sum(each.nbytes for each in segments))
    assert reserved[0] <= 2 * MIB < reserved[1]  # one small segment


@pytest.mark.parametrize("text", ["expandable_segments:True", "max_split_size_mb:64"])
def test_blocks_are_not_held_where_the_allocator_has_other_rules(text: str) -> None:
    plan = plans(planner_of_step(1, times=1_000_003))[0]
    assert project(plan, parse_settings(text), repair=False, held_blocks=True).held_blocks is None


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "expandable_segments:True"])
def test_a_budget_for_a_device_limits_reserved_bytes(text: str) -> None:
    planner = planner_of_step(3, times=1_000_003)
    settings = parse_settings(text)
    allowed = project(planner.plan(planner.plain_peak_bytes), settings).figures.reserved_peak_bytes
    seconds, refusal = 0.0, None
    while refusal is None:
        try:
            plan, heap = plan_for_device(planner.draft, allowed, settings)
        except BudgetTooSmall as fault:
            refusal = fault
        else:
            assert heap.figures.reserved_peak_bytes <= allowed
            assert heap.figures.requested_peak_bytes == plan.projected_peak_bytes
            assert plan.projected_seconds >= seconds  # a smaller budget is never answered by a faster plan
            seconds, allowed = plan.projected_seconds, heap.figures.reserved_peak_bytes - 1
    assert "fragmentation in the caching allocator" in str(refusal)
    assert refusal.allowed_bytes == allowed
    _, smallest = plan_for_device(planner.draft, refusal.minimum_bytes, settings)
    assert smallest.figures.reserved_peak_bytes == refusal.minimum_bytes


def test_a_device_that_is_too_small_for_a_plan_is_out_of_memory() -> None:
    plan = planner_of_step(1, times=1_000_003).plan(2**50)
    with pytest.raises(OutOfDeviceMemory):
        project(plan, AllocatorSettings(capacity_bytes=plan.projected_peak_bytes // 2))


def test_growth_shows_over_iterations() -> None:
    heap = project(planner_of_step(2, times=1_000_003).plan(2**50), DEFAULTS, repair=False)
    reserved = [figures.reserved_peak_bytes for figures in heap.iterations]
    assert len(reserved) == 3
    assert reserved == sorted(reserved)
    assert reserved[-1] == heap.figures.reserved_peak_bytes


def test_shapes_in_turn_keep_what_was_reserved() -> None:
    small, large = (planner_of_step(2, times=times).plan(2**50) for times in (500_009, 1_000_003))
    alone = project(large, DEFAULTS, repair=False)
    assert project_in_turn([large] * 3, DEFAULTS) == alone.iterations
    reserved = [figures.reserved_bytes for figures in reserved_in_turn([small, large, small, large])]
    assert reserved[0] < alone.figures.requested_peak_bytes
    assert reserved[1] > reserved[0]
    assert reserved == sorted(reserved)  # segments stay
    down = project_in_turn([large, small], DEFAULTS)
    assert down[0].requested_bytes == sum(nbytes for _, nbytes in requests_of(large).before)
    assert down[1].requested_bytes == sum(nbytes for _, nbytes in requests_of(small).before)


@pytest.mark.slow
def test_plan_shows_what_the_allocator_reserves(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(SAMPLE), "--budget", "4MiB", "--allocator"]
    assert main([*words, "cuda", "--json"]) == 0
    heap = json.loads(capsys.readouterr().out)["heap"]
    assert heap["reserved_peak_bytes"] == heap["floor_bytes"] == 2 * MIB
    assert heap["reserved_by_iteration"] == [2 * MIB] * 3
    assert heap["held_blocks"] == 0
    assert main([*words, "cuda,expandable_segments:True"]) == 0
    assert "fragmentation" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--budget", "1GiB", "--allocator", "rocm"], "no allocator 'rocm'"),
        (["--budget", "1GiB", "--allocator", "cuda,split:1"], "no allocator setting 'split'"),
        (["--frontier", "--allocator", "cuda"], "needs --budget"),
        (["--budget", "1GiB", "--held-blocks"], "needs --allocator cuda or --device"),
    ],
)
def test_wrong_words_are_refused(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(SAMPLE), *words]) in (1, 2)
    assert told in capsys.readouterr().err
