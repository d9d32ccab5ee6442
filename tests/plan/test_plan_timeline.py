"""The timeline of a plan adds up to what the simulator says, and tells who was where."""

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from small_steps import training_step, uneven_prices

from stowplan.analyse.timeline import Doing, Timeline
from stowplan.formats import chainer
from stowplan.plan.decision import Again, Free
from stowplan.plan.make import Planner
from stowplan.plan.plan import Plan
from stowplan.plan.pricing import price_by_macs
from stowplan.plan.timeline import timeline_of_plan


def plans(planner: Planner) -> list[Plan]:
    """Plans from the smallest to a roomy budget."""
    low, high = planner.minimum_bytes, planner.plain_peak_bytes
    return [planner.plan(low + (high - low) * share // 4) for share in range(5)]


def curve_of_runs(plan: Plan) -> list[int]:
    curve = zip(plan.steps, plan.projected_curve_bytes, strict=True)
    return [level for step, level in curve if not isinstance(step, Free)]


def check(plan: Plan) -> Timeline:
    timeline = timeline_of_plan(plan)
    assert timeline.curve_bytes().tolist() == curve_of_runs(plan)
    repeated = sum(isinstance(step, Again) for step in plan.steps)
    assert sum(run.doing is Doing.AGAIN for run in timeline.runs) == repeated
    neighbours = defaultdict(list)
    for stay in sorted(timeline.stays, key=lambda stay: stay.first):
        assert stay.first <= stay.last < len(timeline.runs)
        assert all(stay.first <= use <= stay.last + 1 for use in stay.uses)
        neighbours[stay.place].append(stay)
    for stays in neighbours.values():
        assert all(later.first == earlier.last + 1 for earlier, later in pairwise(stays))
    return timeline


@pytest.mark.parametrize("seed", range(12))
def test_stays_add_up_to_the_projected_curve(seed: int) -> None:
    graph = training_step(seed, layers=12)
    for plan in plans(Planner.of(graph, uneven_prices(graph, seed), moves=300)):
        check(plan)


def test_a_tensor_made_again_has_a_copy_for_each_time(seeds: Callable[[str], Path]) -> None:
    graph = chainer.read(seeds("000").read_text(), chainer.SavedView.RETAIN).graph
    planner = Planner.of(graph, price_by_macs(graph), moves=400)
    plan = planner.plan(planner.minimum_bytes)
    timeline = check(plan)
    made = defaultdict(list)
    for stay in timeline.stays:
        made[stay.tensor].append(stay.copy)
    remade = [name for step in plan.steps if isinstance(step, Again) for name in step.outputs]
    assert remade
    assert all(sorted(made[name]) == list(range(1 + remade.count(name))) for name in remade)
