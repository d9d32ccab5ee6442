"""Budgets that no recomputation reaches are met with tiles: within rounding, as measured, and told so."""

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from stowplan import Search
from stowplan.capture import capture
from stowplan.errors import BadUse, BudgetTooSmall
from stowplan.plan.draft import Exactness
from stowplan.plan.files import plan_file
from stowplan.plan.options import PlanOptions
from stowplan.plan.steps import Tile
from stowplan.run.fit import fit, plans_of
from stowplan.run.measure.measure import measure
from stowplan.run.planning.planner import Subject, draft_step, planner_for_captured, step_planner
from stowplan.techniques.tiles.run.sweep_probes import SweepProbes
from tests.support.in_tiles import gradients_of, relative_error
from tests.support.nets import NETS

pytestmark = pytest.mark.torch

TILES = ("recompute", "tile")

MOVES = 1000
Built = tuple[nn.Module, tuple[Tensor, ...]]


@pytest.fixture(scope="module")
def vgg() -> Built:
    """Mostly activations, most of them in its first stages."""
    model, args = NETS["vgg16"].build("tiny", resolution=128, batch=1, width=8, hidden=16)
    return model, args


@pytest.fixture(scope="module")
def floor_bytes(vgg: Built) -> int:
    """The smallest budget without tiles."""
    return planner_for_captured(capture(*vgg), options=PlanOptions(search=Search(moves=MOVES))).minimum_bytes


@pytest.mark.slow
def test_below_the_floor_of_recomputation(vgg: Built, floor_bytes: int) -> None:
    model, args = copy.deepcopy(vgg[0]), vgg[1]
    allowed = int(0.75 * floor_bytes)
    fitted = fit(
        model, args, budget=allowed, allow=TILES, search=Search(moves=MOVES)
    )  # however slow they seem beside others
    (plan,) = plans_of(fitted)
    assert plan.exactness is Exactness.ROUNDING
    assert plan.projected_peak_bytes <= allowed
    loss, gradients = gradients_of(model, model, args)
    found, in_tiles = gradients_of(fitted, model, args)
    assert relative_error([found, *in_tiles], [loss, *gradients]) < 1e-5

    def once() -> None:
        loss = fitted(*args)
        assert isinstance(loss, Tensor)
        torch.autograd.backward(loss)

    model.zero_grad(set_to_none=True)
    standing = [*model.parameters(), *model.buffers(), *args]
    assert measure(once, before=standing).measured_peak_bytes <= allowed


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.9, 0.75, 0.6])
def test_candidates_that_are_not_captured_have_no_plan(
    vgg: Built, floor_bytes: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ops beside the sweeps need is known before a candidate is captured."""
    subject = Subject(capture(*vgg), *vgg, {})
    planner = step_planner(subject, PlanOptions(search=Search(moves=MOVES)))
    found = planner.answer(int(share * floor_bytes))[0]
    monkeypatch.setattr(SweepProbes, "floor_beside", lambda *_: 0)
    all_tried = step_planner(subject, PlanOptions(search=Search(moves=MOVES))).answer(
        int(share * floor_bytes)
    )[0]
    assert found.projected_seconds == all_tried.projected_seconds


@pytest.mark.slow
def test_a_plan_with_tiles_is_a_plan(vgg: Built, floor_bytes: int) -> None:
    """It verifies, is the same after its file, tells its tiles, and reads as code."""
    model, args = vgg
    subject = Subject(capture(model, args), model, args, {})
    planned = draft_step(
        subject, int(0.75 * floor_bytes), options=PlanOptions(search=Search(moves=MOVES))
    ).verified()
    plan = planned.plan
    assert plan_file.read(plan_file.write(plan)) == plan
    tiled = {name for name, decision in plan.decisions.items() if isinstance(decision, Tile)}
    assert tiled.isdisjoint(plan.graph.tensors)
    sweeps = {op.id for op in plan.graph.ops if op.type.startswith("stowplan.sweep")}
    for told in plan.tile_maps:
        assert told.sweep in sweeps
        assert told.tiles > 1
        assert {f"{told.sweep}/{level.tensor}" for level in told.levels} & tiled
        for level in told.levels:
            assert all(part <= whole for part, whole in zip(level.part, level.whole, strict=False))
    assert "tiles" in planned.bound_to(model).source


@pytest.mark.slow
def test_an_ample_budget_has_no_tiles(vgg: Built) -> None:
    for prefer in ("exactness", "time"):
        (plan,) = plans_of(fit(vgg[0], vgg[1], budget="1GiB", search=Search(prefer=prefer, moves=MOVES)))
        assert plan.exactness is Exactness.BITWISE
        assert plan.tile_maps == ()
        assert plan.time_ratio == 1.0


@pytest.mark.slow
def test_bits_come_before_time_unless_told_otherwise(vgg: Built, floor_bytes: int) -> None:
    allowed = int(1.02 * floor_bytes)
    (exact,) = plans_of(fit(vgg[0], vgg[1], budget=allowed, allow=TILES, search=Search(moves=MOVES)))
    assert exact.exactness is Exactness.BITWISE
    (fastest,) = plans_of(fit(vgg[0], vgg[1], budget=allowed, search=Search(prefer="time", moves=MOVES)))
    assert fastest.projected_seconds <= exact.projected_seconds
    with pytest.raises(BadUse, match="prefer is 'luck'"):
        fit(vgg[0], vgg[1], budget=allowed, search=Search(prefer=cast(Any, "luck")))


@pytest.mark.slow
def test_a_budget_below_everything_is_refused_with_the_smallest(vgg: Built, floor_bytes: int) -> None:
    with pytest.raises(BudgetTooSmall) as refused:
        fit(vgg[0], vgg[1], budget=1000, allow=TILES, search=Search(moves=MOVES, time_limit=60))
    assert 1000 < refused.value.minimum_bytes < floor_bytes
    fit(vgg[0], vgg[1], budget=refused.value.minimum_bytes, allow=TILES, search=Search(moves=MOVES))
    with pytest.raises(BudgetTooSmall) as refused:
        fit(vgg[0], vgg[1], budget=1000, allow=["recompute"], search=Search(moves=MOVES))
    assert refused.value.minimum_bytes == floor_bytes
