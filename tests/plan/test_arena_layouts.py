"""Layouts of an arena: nothing overlaps, what leaves keeps its place, and the judge sees each fault."""

from dataclasses import replace

import pytest

from stowplan import Search
from stowplan.analyse.timeline import OpRun, Stay, Timeline
from stowplan.errors import IllegalPlan
from stowplan.ir import Graph
from stowplan.plan.allocator.projection import project
from stowplan.plan.allocator.requests import requests_of
from stowplan.plan.allocator.settings import AllocatorSettings
from stowplan.plan.draft import ArenaUse
from stowplan.plan.explain.timeline import timeline_of_plan
from stowplan.plan.options import PlanOptions
from stowplan.plan.plan import Plan
from stowplan.plan.planner import Planner
from stowplan.techniques.arena.plan.layout import ArenaLayout, Placement, Slot, lay_out, refuse_unsafe
from tests.support.steps import random_step, uneven_prices


def timeline(*stays: tuple[str, int, int, int]) -> Timeline:
    """Tensors with bytes, first and last run, each in a place of its own and made in the step."""
    runs = 1 + max(last for *_, last in stays)
    return Timeline(
        Graph({}, ()),
        tuple(OpRun(f"op {number}") for number in range(runs)),
        tuple(
            Stay(name, nbytes, first, last, True, (), place)
            for place, (name, nbytes, first, last) in enumerate(stays)
        ),
    )


STEP = timeline(("a", 100, 0, 1), ("b", 60, 1, 2), ("c", 100, 2, 3), ("gradient", 40, 3, 4))
WRITTEN = dict.fromkeys(("a", "b", "c", "gradient"), Placement.WRITTEN)


def test_a_tensor_that_others_keep_does_not_follow_another_in_its_place() -> None:
    first, *others = STEP.stays
    kept = Stay("kept", 100, 2, 3, True, (), first.place)
    step = replace(STEP, stays=(first, kept, *others))
    assert ("a", 0) not in lay_out(step, WRITTEN, alignment=1).slots
    with pytest.raises(IllegalPlan, match="'kept' must not lie in the arena: others may keep it"):
        refuse_unsafe(lay_out(STEP, WRITTEN, alignment=1), step, able=WRITTEN)


def moved(layout: ArenaLayout, tensor: str, offset: int) -> ArenaLayout:
    slot = layout.slots[tensor, 0]
    return replace(layout, slots={**layout.slots, (tensor, 0): slot._replace(offset=offset)})


def test_tensors_share_the_arena_over_time() -> None:
    layout = lay_out(STEP, WRITTEN, leaving={"gradient"}, alignment=4)
    assert layout.use == ArenaUse(160, 0, 0)
    assert layout.slots["a", 0].offset == layout.slots["c", 0].offset


def test_offsets_are_aligned() -> None:
    layout = lay_out(STEP, WRITTEN, alignment=64)
    assert all(slot.offset % 64 == 0 for slot in layout.slots.values())
    assert layout.use.nbytes == 128 + 64


def test_what_has_no_way_in_lies_beside() -> None:
    layout = lay_out(STEP, {"a": Placement.WRITTEN, "c": Placement.WRITTEN}, alignment=1)
    assert set(layout.slots) == {("a", 0), ("c", 0)}
    assert layout.use == ArenaUse(100, 60, 0)


def test_a_copy_needs_its_bytes_twice_and_is_made_where_that_is_less() -> None:
    """The small one is copied, for its bytes beside are there for a moment; the large one is not."""
    step = timeline(("large", 100, 0, 3), ("small", 10, 0, 3), ("other", 10, 3, 5))
    placements = {"large": Placement.COPIED, "small": Placement.COPIED, "other": Placement.WRITTEN}
    layout = lay_out(step, placements, alignment=1)
    assert layout.use.peak_bytes <= 130
    for (name, _), slot in layout.slots.items():
        assert slot.placement is placements[name]


def test_what_dies_at_once_is_not_copied() -> None:
    """Beside the arena it takes its bytes once, and its slot would be as large again."""
    step = timeline(("kept", 50, 0, 9), ("brief", 100, 2, 3), ("other", 100, 5, 6))
    placements = {"kept": Placement.COPIED, "brief": Placement.COPIED, "other": Placement.COPIED}
    layout = lay_out(step, placements, alignment=1)
    assert not {("brief", 0), ("other", 0)} & layout.slots.keys()
    assert layout.use.peak_bytes == 150


def test_an_overlap_is_caught() -> None:
    layout = lay_out(STEP, WRITTEN, alignment=1)
    with pytest.raises(IllegalPlan, match="'a' and 'b' share bytes of the arena while both are needed"):
        refuse_unsafe(moved(layout, "b", layout.slots["a", 0].offset + 99), STEP, able=WRITTEN)


def test_a_tensor_that_leaves_keeps_its_place() -> None:
    layout = lay_out(STEP, WRITTEN, alignment=1)
    with pytest.raises(IllegalPlan, match="'b' leaves the step, and its place in the arena is used again"):
        refuse_unsafe(layout, STEP, able=WRITTEN, leaving={"b"})


@pytest.mark.parametrize(
    ("slot", "message"),
    [
        (Slot(-4, 60, Placement.WRITTEN), "outside of the arena"),
        (Slot(120, 60, Placement.WRITTEN), "outside of the arena"),
        (Slot(2, 60, Placement.WRITTEN), "across its lines"),
        (Slot(100, 56, Placement.WRITTEN), "larger than its place"),
    ],
)
def test_a_slot_lies_in_the_arena(slot: Slot, message: str) -> None:
    layout = lay_out(STEP, WRITTEN, alignment=4)
    with pytest.raises(IllegalPlan, match=message):
        refuse_unsafe(
            ArenaLayout({**layout.slots, ("b", 0): slot}, layout.use), STEP, able=WRITTEN, alignment=4
        )


def plan() -> Plan:
    graph = random_step(3, layers=3)
    planner = Planner.of(graph, uneven_prices(graph, 3), PlanOptions(search=Search(moves=2)))
    return planner.plan(planner.minimum_bytes)


@pytest.mark.parametrize("placement", Placement)
def test_the_requests_of_a_step_in_an_arena_add_up(placement: Placement) -> None:
    """One block for the arena, and what is beside it: at most what the layout says, to the byte."""
    made = plan()
    walked = timeline_of_plan(made)
    layout = lay_out(walked, {stay.tensor: placement for stay in walked.stays if stay.made}, alignment=512)
    requests = requests_of(made, arena=layout)
    assert sum(request.nbytes == layout.use.nbytes for request in requests.iteration) >= 1
    heap = project(made, AllocatorSettings(), arena=layout)
    assert heap.figures.requested_peak_bytes == layout.use.peak_bytes
