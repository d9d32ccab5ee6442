"""Tiles enter a plan where the budget asks for them, and nowhere else."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stowplan.analyse.costs import costs_of
from stowplan.errors import BudgetTooSmall
from stowplan.formats.door import read_document
from stowplan.plan.decision import Tile
from stowplan.plan.plan import Plan
from stowplan.plan.pricing import price_by_macs
from stowplan.plan.tiles.candidates import stages_of
from stowplan.plan.tiles.planner import TilePlanner
from stowplan.plan.verify import verify

MIB = 2**20


@pytest.fixture(scope="module")
def planner(seeds: Callable[[str], Path]) -> TilePlanner:
    """Of the document's U-Net."""
    graph = read_document(seeds("000")).graph
    return TilePlanner.of(graph, price_by_macs(graph), moves=400)


def grids(plan: Plan) -> set[tuple[int, ...]]:
    return {decision.parts for decision in plan.decisions.values() if isinstance(decision, Tile)}


def test_an_ample_budget_has_no_tiles(planner: TilePlanner) -> None:
    plan = verify(planner.plan(8000 * MIB))
    assert grids(plan) == set()
    assert plan.time_ratio == 1.0


def test_samples_apart_bring_the_unet_to_a_sixth_at_no_cost(planner: TilePlanner) -> None:
    plan = verify(planner.plan(int(1.2 * 1024 * MIB)))
    assert grids(plan) == {(8, 1, 1, 1)}
    assert plan.extra_macs <= 0.01 * costs_of(planner.plain.problem.graph).step_macs
    assert plan.plain_peak_bytes > 6 * plan.projected_peak_bytes


def test_smaller_budgets_cost_more_time_and_never_more_memory(planner: TilePlanner) -> None:
    budgets = [mib * MIB for mib in (8000, 4000, 2000, 1229, 800, 600, 500, 400)]
    plans = [verify(planner.plan(budget)) for budget in budgets]
    ratios = [plan.time_ratio for plan in plans]
    assert ratios == sorted(ratios)
    for plan, budget in zip(plans, budgets, strict=True):
        assert plan.projected_peak_bytes <= budget


def test_a_budget_below_every_tile_names_the_smallest(planner: TilePlanner) -> None:
    with pytest.raises(BudgetTooSmall) as refused:
        planner.plan(100 * MIB)
    assert refused.value.minimum_bytes == planner.minimum_bytes
    assert 237 * MIB < planner.minimum_bytes <= 400 * MIB


def test_stages_are_the_forward_half_in_order(planner: TilePlanner) -> None:
    graph = planner.plain.problem.graph
    names = [name for stage in stages_of(graph) for name in stage]
    assert names == [op.id for op in graph.ops if op.phase == "forward"]
