"""Tiles enter a plan where the budget asks for them, and nowhere else."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from stowplan import Search
from stowplan.analyse.facts import costs_of
from stowplan.analyse.tile_costs import tile_costs_of
from stowplan.api import load_plan
from stowplan.capture import capture
from stowplan.errors import BudgetTooSmall
from stowplan.formats.door import read_document
from stowplan.geometry import Rect, are_disjoint, covers
from stowplan.ir import Graph
from stowplan.ops.table import shape_of
from stowplan.plan.draft import Exactness
from stowplan.plan.explain.explain import explain_tiled
from stowplan.plan.files import plan_file
from stowplan.plan.options import PlanOptions
from stowplan.plan.plan import Plan
from stowplan.plan.prices import price_by_macs
from stowplan.plan.select import Candidate, Selector, planner_of
from stowplan.plan.steps import Tile
from stowplan.techniques.tiles.plan.borders import crops_early
from stowplan.techniques.tiles.plan.candidates import stages_of
from stowplan.techniques.tiles.plan.costs import costs_of_sweep
from stowplan.techniques.tiles.plan.plugin import tiles_for_document
from stowplan.techniques.tiles.plan.rounds import rounds_of
from stowplan.techniques.tiles.plan.segment import segment_of

MIB = 2**20
MOVES = 400


@pytest.fixture(scope="module")
def graph(dump: Callable[[str], Path]) -> Graph:
    """The document's U-Net."""
    return read_document(dump("chainer"), saved="retain").graph


@pytest.fixture(scope="module")
def planner(graph: Graph) -> Selector[Candidate]:
    """Takes whatever is fastest."""
    return planner_of(
        graph, price_by_macs(graph), options=PlanOptions(search=Search(prefer="time", moves=MOVES, gap=0))
    )


def extra_share(plan: Plan, graph: Graph) -> float:
    return plan.extra_macs / costs_of(graph).step_macs


def grids(plan: Plan) -> set[tuple[int, ...]]:
    return {told.parts for told in plan.tile_maps}


def test_an_ample_budget_has_no_tiles(planner: Selector[Candidate]) -> None:
    plan = planner.plan(8000 * MIB)
    assert plan.exactness is Exactness.BITWISE
    assert plan.tile_maps == ()
    assert plan.time_ratio == 1.0


@pytest.mark.slow
def test_samples_apart_bring_the_unet_to_a_sixth_at_no_cost(
    planner: Selector[Candidate], graph: Graph
) -> None:
    plan = planner.plan(int(1.2 * 1024 * MIB))
    assert grids(plan) == {(8, 1, 1, 1)}
    assert extra_share(plan, graph) <= 0.01
    assert plan.plain_peak_bytes > 6 * plan.projected_peak_bytes


@pytest.mark.slow
def test_what_one_sample_needs_is_planned_further(planner: Selector[Candidate], graph: Graph) -> None:
    plan = planner.plan(700 * MIB)
    assert extra_share(plan, graph) <= 0.08  # with many more moves 0.005
    (told,) = plan.tile_maps
    assert told.parts == (8, 1, 1, 1)
    assert told.again or told.within
    assert plan_file.read(plan_file.write(plan)) == plan


@pytest.mark.slow
def test_smaller_budgets_cost_more_time_and_never_more_memory(planner: Selector[Candidate]) -> None:
    budgets = [mib * MIB for mib in (8000, 4000, 2000, 1229, 800, 600, 500, 400)]
    plans = [planner.plan(budget) for budget in budgets]
    ratios = [plan.time_ratio for plan in plans]
    assert ratios == sorted(ratios)
    for plan, budget in zip(plans, budgets, strict=True):
        assert plan.projected_peak_bytes <= budget


@pytest.mark.slow
def test_a_budget_below_every_tile_names_the_smallest(planner: Selector[Candidate]) -> None:
    with pytest.raises(BudgetTooSmall) as refused:
        planner.plan(100 * MIB)
    assert refused.value.minimum_bytes == planner.minimum_bytes
    assert 237 * MIB < planner.minimum_bytes <= 400 * MIB
    assert planner.plan(planner.minimum_bytes).projected_peak_bytes <= planner.minimum_bytes


@pytest.mark.slow
def test_the_frontier_shows_where_tiles_enter(planner: Selector[Candidate]) -> None:
    offers = planner.tradeoffs()
    assert offers[0].peak_bytes == planner.minimum_bytes
    assert offers[0].exactness is Exactness.ROUNDING
    assert offers[-1].seconds == planner.baseline.seconds
    for smaller, larger in pairwise(offers):
        assert smaller.peak_bytes < larger.peak_bytes
        assert smaller.seconds > larger.seconds


@pytest.mark.slow
def test_bits_come_before_time(planner: Selector[Candidate], graph: Graph) -> None:
    exact = planner_of(graph, price_by_macs(graph), options=PlanOptions(search=Search(moves=MOVES)))
    offers = exact.tradeoffs()
    assert [o.exactness for o in offers] == sorted((o.exactness for o in offers), reverse=True)
    allowed = 3200 * MIB
    assert exact.plan(allowed).exactness is Exactness.BITWISE
    assert planner.plan(allowed).exactness is Exactness.ROUNDING
    assert planner.plan(allowed).projected_seconds < exact.plan(allowed).projected_seconds
    assert exact.plan(1200 * MIB) == planner.plan(1200 * MIB)
    without = planner_of(
        graph, price_by_macs(graph), options=PlanOptions(allow=["recompute"], search=Search(moves=MOVES))
    )
    with pytest.raises(BudgetTooSmall):
        without.plan(1200 * MIB)


@pytest.mark.slow
def test_tensors_in_tiles_are_decided_so(planner: Selector[Candidate]) -> None:
    plan = planner.plan(700 * MIB)
    assert any(isinstance(decision, Tile) for decision in plan.decisions.values())
    assert {
        type(decision) for name, decision in plan.decisions.items() if name not in plan.graph.tensors
    } == {Tile}


def test_stages_are_the_forward_half_in_order(graph: Graph) -> None:
    names = [name for stage in stages_of(graph) for name in stage]
    assert names == [op.id for op in graph.ops if op.phase == "forward"]


def test_a_pool_and_a_crop_are_cut_over_each_other(graph: Graph) -> None:
    """Cut evenly each, tiles of the first stage would make a third of it twice."""
    early = crops_early(graph)
    first = segment_of(early, stages_of(early)[0])
    (only,) = rounds_of(first, (1, 1, 4, 4))
    assert costs_of_sweep(first, (only,)).halo_share < 0.02
    for name in first.outputs:
        cells = [tile.owned[name] for tile in only.tiles if name in tile.owned]
        assert are_disjoint(cells)
        assert covers(cells, Rect.of_shape(shape_of(early.tensors[name])))


@pytest.mark.slow
def test_explain_finds_what_is_never_whole(planner: Selector[Candidate]) -> None:
    plan = planner.plan(700 * MIB)
    (told,) = plan.tile_maps
    level = told.levels[3]
    found = explain_tiled(plan, level.tensor)
    assert found is not None
    assert found.level.part[0] == 1 < found.level.whole[0] == 8
    assert explain_tiled(plan, f"{told.sweep}/{level.tensor}") == found
    assert explain_tiled(plan, "nowhere") is None


def test_tiles_of_ours_do_less_than_those_of_a_file_in_no_more_memory(
    dump: Callable[[str], Path],
) -> None:
    document = read_document(dump("tilelog"))
    ours = tiles_for_document(document)
    assert document.tiles is not None
    assert ours is not None
    assert ours.tiles > 1
    theirs = tile_costs_of(document.graph, document.tiles)
    assert sum(level.work * level.macs for level in ours.levels) < theirs.forward_macs / 3


@pytest.mark.torch
@pytest.mark.slow
def test_a_step_that_writes_its_sums_of_gradients_out_is_answered() -> None:
    """A tile whose inside others read is no way to go, and no reason to fail."""
    from stowplan.capture import capture
    from tests.support.nets import NETS

    model, args = NETS["resnet50"].build("tiny")
    step = capture(model, args).graph
    planner = planner_of(
        step, price_by_macs(step), options=PlanOptions(allow=("tile",), search=Search(moves=50))
    )
    with pytest.raises(BudgetTooSmall):
        planner.plan(planner.baseline.peak_bytes // 8)


def test_tiles_leave_out_what_a_crop_drops_and_their_plan_can_be_read(tmp_path: Path) -> None:
    body = [layer for _ in range(4) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())]
    captured = capture(nn.Sequential(*body), (torch.randn(1, 4, 64, 64),), loss=_middle_rows)
    planner = planner_of(
        captured.graph, price_by_macs(captured.graph), PlanOptions(("tile",), search=Search(moves=50))
    )
    plan = planner.plan(planner.baseline.peak_bytes // 3)
    assert plan.tile_maps
    assert plan.tile_maps[0].halo_share == 0.0
    plan.save(tmp_path / "cropped.plan.json")
    assert load_plan(tmp_path / "cropped.plan.json") == plan


def _middle_rows(made: torch.Tensor) -> torch.Tensor:
    return made[:, :, 24:40].square().mean()
