"""What changed between two plans, and the sentences that say why a tensor was decided so."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stowplan import Search
from stowplan.analyse.timeline import Doing, timeline_of
from stowplan.formats import chainer
from stowplan.plan.explain.comparison import Side, comparison_of
from stowplan.plan.explain.reasons import decisions_of, reasons_of
from stowplan.plan.explain.timeline import timeline_of_plan
from stowplan.plan.options import PlanOptions
from stowplan.plan.plan import Plan
from stowplan.plan.planner import Planner
from stowplan.plan.prices import price_by_macs
from stowplan.plan.steps import Keep, Recompute


@pytest.fixture(scope="module")
def planner(dump: Callable[[str], Path]) -> Planner:
    graph = chainer.read(dump("chainer").read_text(), chainer.SavedView.RETAIN).graph
    return Planner.of(graph, price_by_macs(graph), options=PlanOptions(search=Search(moves=400)))


def side(plan: Plan) -> Side:
    return Side(timeline_of_plan(plan), plan)


@pytest.mark.slow
def test_figures_are_those_of_the_plans(planner: Planner) -> None:
    roomy, tight = planner.plan(planner.plain_peak_bytes), planner.plan(planner.minimum_bytes)
    comparison = comparison_of(side(roomy), side(tight))
    assert comparison.before.peak_bytes == roomy.projected_peak_bytes
    assert comparison.after.peak_bytes == tight.projected_peak_bytes
    assert comparison.after.time_ratio == tight.time_ratio
    assert comparison.after.runs_again > comparison.before.runs_again
    assert comparison.only_before == comparison.only_after == 0


@pytest.mark.slow
def test_changes_are_the_tensors_that_fare_otherwise(planner: Planner) -> None:
    roomy, tight = planner.plan(planner.plain_peak_bytes), planner.plan(planner.minimum_bytes)
    assert comparison_of(side(tight), side(tight)).changes == ()
    changes = comparison_of(side(roomy), side(tight)).changes
    remade = {name for name, decision in tight.decisions.items() if isinstance(decision, Recompute)}
    kept = {name for name, decision in roomy.decisions.items() if isinstance(decision, Keep)}
    told = {change.tensor for change in changes if (change.before, change.after) == ("keep", "recompute")}
    assert remade & kept <= told
    moved = [change.at_peak_before != change.at_peak_after for change in changes]
    assert moved == sorted(moved, reverse=True)


@pytest.mark.slow
def test_a_plan_is_compared_with_the_baseline(planner: Planner) -> None:
    tight = planner.plan(planner.minimum_bytes)
    comparison = comparison_of(Side(timeline_of(tight.graph)), side(tight))
    assert comparison.before.allowed_bytes is None
    assert comparison.before.peak_bytes > comparison.after.peak_bytes


def test_everything_decided_has_a_reason_that_names_its_price(planner: Planner) -> None:
    plan = planner.plan(planner.minimum_bytes)
    timeline = timeline_of_plan(plan)
    reasons = reasons_of(plan, timeline)
    assert reasons.keys() == decisions_of(plan, timeline).keys() >= plan.decisions.keys()
    for name, decision in plan.decisions.items():
        assert ("recomputed" in reasons[name]) == isinstance(decision, Recompute)
        assert "% of the baseline" in reasons[name]


def test_a_recomputed_tensor_says_how_far_over_the_budget_it_would_be(
    planner: Planner,
) -> None:
    plan = planner.plan(planner.minimum_bytes)
    reasons = reasons_of(plan, timeline_of_plan(plan))
    assert any("over the budget" in reason for reason in reasons.values())


def test_a_source_of_recomputation_counts_as_kept(planner: Planner) -> None:
    plan = planner.plan(planner.minimum_bytes)
    timeline = timeline_of_plan(plan)
    added = decisions_of(plan, timeline).keys() - plan.decisions.keys()
    stays = {stay.tensor: stay for stay in timeline.stays if not stay.copy}
    again = {at for at, run in enumerate(timeline.runs) if run.doing is Doing.RECOMPUTE}
    assert all(again & set(stays[name].uses) for name in added)
