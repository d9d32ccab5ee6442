"""Tiles from the command line: entered where nothing else fits, told, checked, explained."""

import json
from collections.abc import Callable

import pytest

from stowplan.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.torch]

ASKED = ("--allow", "recompute,tile")  # however slow

_MODEL = """
import torch
from torch import nn


def step():
    torch.manual_seed(0)
    layers = [layer for n in (1, 8, 8) for layer in (nn.Conv2d(n, 8, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(*layers, nn.MaxPool2d(4), nn.Conv2d(8, 2, 1))
    return model, (torch.randn(1, 1, 96, 96),), lambda output: output.square().mean()
"""


@pytest.fixture
def model(step_file: Callable[[str, str], str]) -> str:
    """MODULE:FUNCTION of a step in the working directory, whose first stage holds nearly all."""
    return step_file("wide_step", _MODEL)


def _json_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    main([*words, "--json"])
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_a_step_below_the_floor_of_recomputation(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused = _json_of(capsys, "plan", model, "--budget", "100kB", "--allow", "recompute")
    budget = str(int(int(str(refused["minimum_bytes"])) * 0.8))
    assert _json_of(capsys, "plan", model, "--budget", budget, "--allow", "recompute")["feasible"] is False
    plan = _json_of(capsys, "plan", model, "--budget", budget, *ASKED, "-o", "plan.json")
    assert plan["exactness"] == "within rounding"
    tiles = plan["tiles"]
    assert isinstance(tiles, list)
    inside = f"{tiles[0]['sweep']}/relu"
    assert _json_of(capsys, "explain", "plan.json", inside)["decision"] == "tile"
    assert _json_of(capsys, "explain", "plan.json", "1")["tensor"] == "relu"  # by the path of its module
    assert main(["explain", "plan.json"]) == 0
    said = capsys.readouterr().out
    assert "within rounding" in said
    assert "largest part" in said
    checked = _json_of(capsys, "check", model, "--budget", budget, *ASKED)
    assert checked["holds"] is True
    assert checked["exactness"] == "within rounding"
    assert int(str(checked["measured_peak_bytes"])) <= int(budget)
