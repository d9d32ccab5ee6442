"""Steps that move tensors to disk and back: the same bits, within the budget, told beforehand."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stowplan.capture import capture
from stowplan.plan.options import PlanOptions
from stowplan.plan.planner import Planner
from stowplan.plan.prices import price_by_roofline
from stowplan.plan.pricing import Machine, Tier
from stowplan.plan.steps import Store
from stowplan.run.cost.machine import ProbeCache
from stowplan.run.fit import fit, plans_of
from stowplan.run.measure.measure import measure
from stowplan.run.planning.planner import price_captured
from stowplan.run.step.straight import StraightStep
from stowplan.techniques.offload.run.disk import DiskTier, rates_of
from tests.support.nets import NETS
from tests.support.side_by_side import different, trained
from tests.support.spilling import SMALL, Little, everything_moved

_SLOW = Machine(macs_per_second=1e8, bytes_per_second=1e8)  # so that tiny networks give transfers time


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    opened = DiskTier(tmp_path, chunk_bytes=SMALL)
    yield opened
    opened.close()


@pytest.mark.parametrize("name", NETS)
@pytest.mark.slow
def test_all_that_can_be_moved_is_the_same_to_the_bit(name: str, tier: DiskTier) -> None:
    example = NETS[name].build("tiny")
    twin = copy.deepcopy(example.model)
    captured = capture(twin, example.args)
    moved = StraightStep(captured, twin, steps=everything_moved(captured), tier=tier)
    expected = trained(example.model, example.model, example.args)
    assert not different(expected, trained(moved, twin, example.args))


@pytest.mark.parametrize("name", NETS)
@pytest.mark.slow
def test_what_a_budget_moves_is_the_same_to_the_bit(name: str, tier: DiskTier) -> None:
    example = NETS[name].build("tiny")
    twin = copy.deepcopy(example.model)
    captured = capture(twin, example.args)
    known = Tier("disk", 2**30, 1e9, 1e9, 1e-5)
    pricing = replace(price_by_roofline(captured.graph, _SLOW), tier=known)
    planner = Planner.of(captured.graph, pricing, options=PlanOptions(allow=("offload",)))
    plan = planner.plan((planner.minimum_bytes + planner.plain_peak_bytes) // 2)
    nothing_to_gain = len(planner.frontier.points) == 1
    assert nothing_to_gain or any(isinstance(step, Store) for step in plan.steps)
    moved = StraightStep(captured, twin, steps=plan.steps, tier=tier)
    expected = trained(example.model, example.model, example.args)
    assert not different(expected, trained(moved, twin, example.args))


@pytest.mark.parametrize("name", ["unet3d", "densenet121", "hf_gpt2"])
@pytest.mark.slow
def test_the_measured_peak_is_the_projected_one(name: str, tier: DiskTier) -> None:
    example = NETS[name].build("tiny")
    captured = capture(example.model, example.args)
    pricing = replace(price_captured(captured), tier=replace(rates_of(tier, cache=None), latency_seconds=0.0))
    planner = Planner.of(captured.graph, pricing, options=PlanOptions(allow=("offload", "offload-gradients")))
    plan = planner.plan((3 * planner.minimum_bytes + planner.plain_peak_bytes) // 4)
    step = StraightStep(captured, example.model, steps=plan.steps, tier=tier)
    _run(step, example.args)
    example.model.zero_grad(set_to_none=True)
    inputs = [leaf for leaf in example.args if isinstance(leaf, Tensor)]
    before = [*example.model.parameters(), *example.model.buffers(), *inputs]
    found = measure(lambda: _run(step, example.args), before=before)
    assert any(isinstance(step, Store) for step in plan.steps)
    assert found.measured_peak_bytes <= plan.allowed_bytes
    assert found.measured_peak_bytes == pytest.approx(plan.projected_peak_bytes, rel=0.01)


def _run(step: StraightStep, args: tuple[object, ...]) -> None:
    loss = step(*args)
    assert isinstance(loss, Tensor)
    torch.autograd.backward(loss)


@pytest.mark.slow
def test_fit_moves_what_it_is_allowed_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOWPLAN_SPILL", str(tmp_path))
    torch.manual_seed(0)
    model, images = Little(), torch.randn(16, 3, 128, 128)
    twin = copy.deepcopy(model)
    fitted = fit(model, (images,), budget="60MiB", allow=("offload",))
    (plan,) = plans_of(fitted)
    assert any(isinstance(step, Store) for step in plan.steps)
    assert not different(trained(twin, twin, (images,)), trained(fitted, fitted, (images,)))


@pytest.mark.slow
def test_rates_are_measured_once(tmp_path: Path, tier: DiskTier) -> None:
    cache = ProbeCache(tmp_path / "findings")
    first = rates_of(tier, cache)
    assert first.store_bytes_per_second > 0 < first.load_bytes_per_second
    assert replace(rates_of(tier, cache), capacity_bytes=0) == replace(first, capacity_bytes=0)


def test_the_source_tells_what_is_moved_and_where_it_waits() -> None:
    torch.manual_seed(0)
    model = Little()
    captured = capture(model, (torch.randn(2, 3, 8, 8),))
    lines = StraightStep(captured, model, steps=everything_moved(captured)).source.splitlines()
    stored = next(number for number, line in enumerate(lines) if "tier.store(" in line)
    assert lines[stored].strip().startswith("away0 = tier.store(")
    assert lines[stored + 1].strip() == "away0.wait()"
    assert lines[stored + 2].strip().startswith("del ")
