"""The timeline of a plan adds up to what the simulator says, and tells who was where."""

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from stowplan import Search
from stowplan.analyse.timeline import Doing, Timeline
from stowplan.formats import chainer
from stowplan.ir import Graph, Kind, Op, Phase, Tensor, Use
from stowplan.plan.explain.timeline import baseline_timeline_of, timeline_of_plan
from stowplan.plan.explain.transfers import clock_of
from stowplan.plan.options import PlanOptions
from stowplan.plan.plan import Plan
from stowplan.plan.planner import Planner
from stowplan.plan.prices import price_by_macs
from stowplan.plan.pricing import Basis, Pricing
from stowplan.plan.steps import Free, RecomputeOp
from tests.support.plans import moved
from tests.support.steps import random_step, uneven_prices


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
    repeated = sum(isinstance(step, RecomputeOp) for step in plan.steps)
    assert sum(run.doing is Doing.RECOMPUTE for run in timeline.runs) == repeated
    neighbours = defaultdict(list)
    for stay in sorted(timeline.stays, key=lambda stay: stay.first):
        assert stay.first <= stay.last < len(timeline.runs)
        assert all(stay.first <= use <= stay.last + 1 for use in stay.uses)
        neighbours[stay.place].append(stay)
    for stays in neighbours.values():
        assert all(later.first == earlier.last + 1 for earlier, later in pairwise(stays))
    return timeline


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.slow
def test_stays_add_up_to_the_projected_curve(seed: int) -> None:
    graph = random_step(seed, layers=12)
    for plan in plans(
        Planner.of(graph, uneven_prices(graph, seed), options=PlanOptions(search=Search(moves=300)))
    ):
        check(plan)


def test_a_view_of_a_view_outlives_the_owner_it_names() -> None:
    names = ("x", "a", "first", "second", "loss", "g")
    kinds = (Kind.INPUT, *[Kind.ACTIVATION] * 4, Kind.GRADIENT)
    views = {"first": "a", "second": "a"}
    tensors = {
        name: Tensor(name, kind, nbytes=64, alias_of=views.get(name))
        for name, kind in zip(names, kinds, strict=True)
    }
    ops = [
        Op(f"make {made}", "View" if made in views else "Wide", Phase.FORWARD, (Use(read),), (Use(made),))
        for read, made in pairwise(names[:5])
    ]
    back = Op("back", "Back", Phase.BACKWARD, (Use("second"),), (Use("g"),))
    graph = Graph(tensors, (*ops, back), frozenset({"g"}))
    planner = Planner.of(
        graph,
        Pricing({op.id: 1.0 for op in graph.ops}, Basis.MEASURED),
        options=PlanOptions(search=Search(moves=50)),
    )
    timeline = check(planner.plan(planner.plain_peak_bytes))
    (stay,) = (stay for stay in timeline.stays if stay.tensor == "a")
    assert timeline.runs[stay.uses[-1]].op == "back"


@pytest.mark.slow
def test_a_recomputed_tensor_has_a_copy_for_each_time(dump: Callable[[str], Path]) -> None:
    graph = chainer.read(dump("chainer").read_text(), chainer.SavedView.RETAIN).graph
    planner = Planner.of(graph, price_by_macs(graph), options=PlanOptions(search=Search(moves=400)))
    plan = planner.plan(planner.minimum_bytes)
    timeline = check(plan)
    made = defaultdict(list)
    for stay in timeline.stays:
        made[stay.tensor].append(stay.copy)
    remade = [name for step in plan.steps if isinstance(step, RecomputeOp) for name in step.outputs]
    assert remade
    assert all(sorted(made[name]) == list(range(1 + remade.count(name))) for name in remade)


def test_the_plain_timeline_peaks_where_the_plan_says() -> None:
    graph = random_step(5, layers=10)
    prices = uneven_prices(graph, 5)
    workspace = {op.id: 40 for op in graph.ops[::3]}
    planner = Planner.of(
        graph,
        Pricing(prices.seconds, Basis.MEASURED, workspace),
        options=PlanOptions(search=Search(moves=50)),
    )
    plan = planner.plan(planner.plain_peak_bytes)
    assert baseline_timeline_of(plan).curve_bytes().max() == plan.plain_peak_bytes


@pytest.fixture
def offloading(dump: Callable[[str], Path]) -> Plan:
    graph = chainer.read(dump("chainer").read_text(), chainer.SavedView.RETAIN).graph
    planner = Planner.of(graph, price_by_macs(graph), options=PlanOptions(search=Search(moves=100)))
    return moved(planner.plan(planner.plain_peak_bytes))


@pytest.mark.slow
def test_what_is_moved_is_in_one_place_at_a_time(offloading: Plan) -> None:
    timeline = check(offloading)
    doings = [run.doing for run in timeline.runs]
    assert doings.count(Doing.STORE) == doings.count(Doing.LOAD) == len(timeline.away) == 4
    for away in timeline.away:
        before, after = (stay for stay in timeline.stays if stay.tensor == away.tensor)
        assert (before.last, after.first) == (away.first, away.last)
        assert doings[away.first] is Doing.STORE
        assert doings[away.last] is Doing.LOAD
    middle = min(away.last for away in timeline.away) - 1
    assert timeline.away_bytes()[middle] == sum(away.nbytes for away in timeline.away)


@pytest.mark.slow
def test_the_clock_of_a_plan_ends_with_its_seconds(offloading: Plan) -> None:
    clock, timeline = clock_of(offloading), timeline_of_plan(offloading)
    assert max(span.end_seconds for span in clock.spans) == pytest.approx(offloading.projected_seconds)
    ops = [s for s, run in zip(clock.spans, timeline.runs, strict=True) if not run.doing.is_transfer]
    assert all(one.end_seconds <= other.start_seconds + 1e-9 for one, other in pairwise(ops))
    waited = sum(stall.seconds for stall in clock.stalls)
    assert waited > 0
    assert sum(span.seconds for span in ops) + waited == pytest.approx(offloading.projected_seconds)
