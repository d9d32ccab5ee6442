"""The other paths on the stand-in: tiles, optimizers, autocast, `torch.compile`, and `stowplan gpu-check`."""

import copy
import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import stowplan
from stowplan.cli.main import main
from stowplan.plan.draft import Exactness
from stowplan.plan.steps import Tile
from stowplan.run.measure.device_check import check_device
from stowplan.run.measure.measure import measure
from stowplan.run.measure.sample_networks import NETWORKS
from tests.support import device as stand_in


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.Tanh())))


def _gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.autograd.backward(loss.sum())
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_tiles_hold_the_budget(device: torch.device) -> None:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 1, 3),
    ]
    eager = nn.Sequential(*layers).to(device)
    image = torch.randn(1, 3, 48, 48, device=device)
    there = [*eager.parameters(), image]
    peak = measure(lambda: _gradients(eager, eager(image)), device=device, before=there).measured_peak_bytes
    fitted = stowplan.fit(copy.deepcopy(eager), (image,), budget=peak // 2, loss=torch.sum, allow=["tile"])
    found = _gradients(fitted, fitted(image))
    (plan,) = stowplan.plans_of(fitted)
    assert any(isinstance(decision, Tile) for decision in plan.decisions.values())
    for one, other in zip(found, _gradients(eager, eager(image)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * other.abs().max().item())
    stand_in.delay(200)
    del found
    there = [*fitted.parameters(), image]
    fitted.zero_grad()
    run = measure(lambda: _gradients(fitted, fitted(image)), device=device, before=there)
    assert run.measured_peak_bytes <= plan.projected_peak_bytes <= peak // 2


def test_an_optimizer_in_the_plan_updates_as_eager_does(device: torch.device) -> None:
    eager, data = _network().to(device), torch.randn(64, 32, device=device)
    model = copy.deepcopy(eager)
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (eager, model)]
    fitted = stowplan.fit(model, (data,), budget="160KiB", loss=torch.sum, optimizer=optimizers[1])
    stand_in.delay(200)
    for _ in range(3):
        for each, optimizer in zip((eager, fitted), optimizers, strict=True):
            torch.autograd.backward(each(data).sum())
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, eager.parameters(), fitted.parameters()))


def test_autocast_around_backward_adds_no_casts(device: torch.device) -> None:
    eager, data = _network().to(device), torch.randn(64, 32, device=device)
    with torch.autocast("standin", dtype=torch.bfloat16):
        fitted = stowplan.fit(
            copy.deepcopy(eager), (data,), budget="1MiB", loss=torch.sum, allow=["recompute"]
        )
        pairs = zip(_gradients(eager, eager(data)), _gradients(fitted, fitted(data)), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    with torch.autocast("standin", dtype=torch.bfloat16):
        losses = [each(data) for each in (eager, fitted)]
    assert losses[0].dtype == torch.bfloat16
    pairs = zip(_gradients(eager, losses[0]), _gradients(fitted, losses[1]), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_the_check_of_a_device_runs_and_finds_what_it_projects(device: torch.device, tmp_path: Path) -> None:
    words = [
        "--networks",
        "perceptron",
        "--device",
        str(device),
        "--time-limit",
        "100000",
        "-o",
        str(tmp_path),
    ]
    assert main(["gpu-check", *words]) == 0
    (network,) = json.loads((tmp_path / "gpu-check.json").read_text())["networks"]
    projected, measured = network["projected"], network["measured"]
    assert projected["requested"] == measured["requested"] > 0
    assert projected["allocated"] == measured["allocated"]
    assert projected["reserved"] == measured["reserved"]
    assert all(plan["held"] and plan["same_bits"] for plan in network["plans"])


_LONG = os.environ.get("STAND_IN") == "long"
_CHECKED = tuple(NETWORKS) if _LONG else ("unet", "unet3d", "separable")  # the others take two minutes


@pytest.mark.parametrize("name", _CHECKED)
def test_three_budgets_hold_on_the_networks_of_the_check(name: str, device: torch.device) -> None:
    found = check_device(device, time_limit=100_000, names=[name], size=1)
    (network,) = found.networks
    assert network.measured is not None
    assert network.projected == network.measured
    assert not network.not_run
    assert len(network.plans) == 3
    for plan in network.plans:
        assert plan.measured_peak_bytes == plan.projected_peak_bytes <= plan.budget_bytes
        assert plan.same_bits
        assert plan.claimed == Exactness.BITWISE
    if name == "gpt":
        assert str(network.seconds["torch.compile"]).startswith("not run: InductorError")


@pytest.mark.skipif(not _LONG, reason="a minute; `make test-device` runs it")
def test_a_compiled_step_has_the_bits_of_eager(device: torch.device) -> None:
    eager, data = _network().to(device), torch.randn(64, 32, device=device)
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, backend="stowplan", options={"budget": "100KiB"})
    stand_in.delay(200)
    for _ in range(2):
        pairs = zip(_gradients(model, compiled(data)), _gradients(eager, eager(data)), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_a_model_on_two_devices_has_the_bits_of_eager(device: torch.device) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8).to(device), nn.Linear(8, 8).to("standin:1")

        def forward(self, data: Tensor) -> Tensor:
            moved: Tensor = torch.tanh(self.first(data)).to("standin:1")
            loss: Tensor = self.second(moved).sum()
            return loss

    eager, data = Two(), torch.randn(4, 8, device=device)
    fitted = stowplan.fit(copy.deepcopy(eager), (data,), budget="1MiB", allow=["recompute"])
    pairs = zip(_gradients(fitted, fitted(data)), _gradients(eager, eager(data)), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
