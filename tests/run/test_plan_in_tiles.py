"""Budgets that no recomputation reaches are met with tiles, exactly and as measured."""

import pytest
import torch
from benchmarks.nets import NETS
from sweeping import gradients_of, relative_error

from stowplan.capture import capture
from stowplan.errors import BudgetTooSmall
from stowplan.run.fit import planner_for_captured
from stowplan.run.measure import measure
from stowplan.run.tiles.plan import plan_in_tiles

pytestmark = pytest.mark.torch


def test_below_the_floor_of_recomputation() -> None:
    model, args = NETS["vgg16"].build("tiny", resolution=128, batch=1, width=8, hidden=16)
    captured = capture(model, args)
    floor = planner_for_captured(captured, moves=2000).minimum_bytes
    allowed = int(0.75 * floor)
    tiled = plan_in_tiles(captured, model, args, allowed_bytes=allowed, moves=2000)
    assert tiled.sweeps
    assert tiled.plan.projected_peak_bytes <= allowed
    loss, gradients = gradients_of(model, model, args)
    found, swept = gradients_of(tiled.bound_to(model), model, args)
    assert relative_error([found, *swept], [loss, *gradients]) < 1e-5

    def once() -> None:
        loss = step(*args)
        assert isinstance(loss, torch.Tensor)
        torch.autograd.backward(loss)

    step = tiled.bound_to(model)
    model.zero_grad(set_to_none=True)
    standing = [*model.parameters(), *model.buffers(), *args]
    assert measure(once, before=standing).measured_peak_bytes <= allowed


def test_an_ample_budget_has_no_tiles() -> None:
    model, args = NETS["vgg16"].build("tiny")
    captured = capture(model, args)
    tiled = plan_in_tiles(captured, model, args, allowed_bytes=2**30, moves=500)
    assert tiled.sweeps == ()
    assert tiled.plan.time_ratio == 1.0


def test_a_budget_below_everything_is_refused_with_the_smallest() -> None:
    model, args = NETS["vgg16"].build("tiny")
    with pytest.raises(BudgetTooSmall) as refused:
        plan_in_tiles(capture(model, args), model, args, allowed_bytes=1000, moves=500)
    assert 1000 < refused.value.minimum_bytes < 2**30
