"""Planning, explaining and checking from the command line, on a small file and a small model."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stowplan.cli.main import main

_MODEL = """
import torch
from torch import nn


def step():
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Dropout(0.5), nn.Linear(64, 1))
    return model, (torch.randn(256, 64),), lambda output: output.square().mean()


def no_loss():
    return nn.Linear(2, 2), (torch.randn(3, 2),)


class Scored(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x, *, scale):
        hidden = self.inner(x).tanh() * scale
        return {"mean": hidden.mean(), "square": hidden.square().mean(), "hidden": hidden}


def named():
    torch.manual_seed(0)
    return Scored(), (torch.randn(16, 8),), {"scale": torch.rand(8)}, "square"


def keywords():
    torch.manual_seed(0)
    return Scored(), (), {"x": torch.randn(16, 8), "scale": torch.rand(8)}, lambda out: out["hidden"].sum()


def misnamed():
    return Scored(), (torch.randn(16, 8),), {"scale": torch.rand(8)}, "cube"


def not_a_step():
    return 3


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def no_optimizer(model):
    return 3
"""


@pytest.fixture
def model(step_file: Callable[[str, str], str]) -> str:
    """MODULE:FUNCTION of a step in the working directory."""
    return step_file("little_step", _MODEL)


def _json_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main([*words, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.torch
@pytest.mark.slow
def test_a_model_is_inspected_and_measured(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = _json_of(capsys, "inspect", model, "--measure", "--optimizer", "adamw")
    eager = found["eager"]
    assert isinstance(eager, dict)
    assert eager["projected_peak_bytes"] == eager["measured_peak_bytes"]
    assert found["format"] == "torch"
    share = found["optimizer"]
    assert isinstance(share, dict)
    assert share["state_bytes"] >= 2 * 4 * (3 * (64 * 64 + 64) + 65)
    assert found["training_peak_bytes"] == found["measured_training_peak_bytes"]


@pytest.mark.torch
@pytest.mark.slow
def test_a_plan_holds_explains_itself_and_checks_out(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plain = _json_of(capsys, "plan", model, "--frontier")["frontier"]
    assert isinstance(plain, list)
    budget = str((plain[0]["budget_bytes"] + plain[-1]["budget_bytes"]) // 2 + 10_000)
    plan = _json_of(capsys, "plan", model, "--budget", budget, "-o", "plan.json")
    assert plan["feasible"] is True
    assert int(str(plan["projected_peak_bytes"])) <= int(budget) < int(str(plan["plain_peak_bytes"]))
    assert plan["minimum_bytes"] is None or int(str(plan["minimum_bytes"])) <= int(budget)
    explained = _json_of(capsys, "explain", "plan.json", "tanh")
    assert explained["maker"] == "tanh"
    assert _json_of(capsys, "explain", "plan.json")["solve_seconds"] is None
    checked = _json_of(capsys, "check", model, "--budget", budget, "-o", "record.json")
    assert checked["holds"] is True
    assert checked["differing"] == {}
    assert int(str(checked["measured_peak_bytes"])) <= int(budget)
    for name in ("plan", "record"):
        assert main(["report", f"{name}.json", "-o", f"{name}.html"]) == 0
        assert (tmp_path / f"{name}.html").stat().st_size > 100_000


@pytest.mark.torch
@pytest.mark.slow
def test_commands_tell_of_the_whole_iteration(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    loop = ("--optimizer", f"{model.partition(':')[0]}:make_optimizer")
    plan = _json_of(capsys, "plan", model, "--budget", "1MiB", *loop, "-o", "plan.json")
    updates = plan["updates"]
    assert isinstance(updates, dict)
    assert (updates["optimizer"], updates["tier"]) == ("SGD", None)
    assert updates["parameters_by_time"] == {"in backward": 7, "in the step": 1}
    assert updates["state_bytes"] == 4 * (3 * (64 * 64 + 64) + 65)
    assert main(["explain", "plan.json"]) == 0
    told = capsys.readouterr().out
    assert "7 in backward, 1 in the step" in told
    assert ["forward", "backward", "update"] in [line.split() for line in told.splitlines()]
    assert main(["explain", "plan.json", "state of 0.weight"]) == 0
    assert "SGD, in backward" in capsys.readouterr().out
    assert main(["report", "plan.json", "-o", "curve.svg"]) == 0
    assert ">update<" in (tmp_path / "curve.svg").read_text()
    capsys.readouterr()
    checked = _json_of(capsys, "check", model, "--plan", "plan.json", *loop, "--iterations", "4")
    assert checked["holds"] is True
    assert main(["plan", model, "--budget", "1MiB", "--accumulate", "2"]) == 2
    assert main(["plan", "plan.json", "--budget", "1MiB", *loop]) == 2
    capsys.readouterr()
    assert main(["inspect", model, "--optimizer", f"{model.partition(':')[0]}:no_optimizer"]) == 2
    assert "must return an optimizer" in capsys.readouterr().err


@pytest.mark.torch
@pytest.mark.slow
def test_a_budget_too_small_is_a_no_with_the_smallest_one(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", model, "--budget", "170kB"]) == 1
    said = capsys.readouterr().err
    assert "smallest plan found needs" in said
    assert "binds through" in said
    assert main(["plan", model, "--budget", "170kB", "--json"]) == 1
    refusal = json.loads(capsys.readouterr().out)
    assert refusal["feasible"] is False
    assert refusal["minimum_bytes"] > refusal["allowed_bytes"] == 170_000
    assert refusal["binding"]


@pytest.mark.torch
def test_a_hopeless_budget_is_refused_before_ops_are_probed(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("stowplan.run.cost.probe.cost_of_call")
    for words in (["--budget", "6"], ["--budget", "6", "--frontier"]):
        assert main(["plan", model, *words]) == 1
        assert "parameters, inputs and gradients alone take" in (said := capsys.readouterr().err)
        assert "did you mean 6GiB?" in said
    assert main(["plan", model, "--budget", "6", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["minimum_bytes"] is None
    assert main(["check", model, "--budget", "6"]) == 1


@pytest.mark.torch
@pytest.mark.slow
def test_commands_and_fit_share_plans_and_check_takes_a_plan(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = "360kB"
    made = _json_of(capsys, "plan", model, "--budget", budget, "-o", "plan.json")
    monkeypatch.delattr("stowplan.run.cost.probe.cost_of_call")
    again = _json_of(capsys, "plan", model, "--budget", budget)
    assert {**again, "solve_seconds": None} == {**made, "solve_seconds": None}
    assert _json_of(capsys, "check", model, "--budget", budget)["holds"] is True
    assert _json_of(capsys, "check", model, "--plan", "plan.json")["holds"] is True
    assert main(["check", model, "--plan", "plan.json", "--budget", "200kB"]) == 1
    assert "the plan takes" in capsys.readouterr().err


@pytest.mark.torch
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "little_step:step"], "--budget"),
        (["plan", "little_step:step", "--budget", "6 bananas"], "is not a size"),
        (["plan", "little_step:step", "--budget", "1MB", "--allow", "magic"], "no technique 'magic'"),
        (["plan", "little_step:nowhere", "--budget", "1MB"], "no function 'nowhere'"),
        (["plan", "nowhere_at_all:step", "--budget", "1MB"], "there is no module"),
        (
            ["plan", "tests/data/none.json", "--budget", "1MB", "--kernels", "compiled"],
            "has no kernels to compile",
        ),
        (
            ["plan", "little_step:step", "--budget", "1MB", "--device", "a100-80gb", "--kernels", "compiled"],
            "for this machine",
        ),
        (["inspect", "little_step:not_a_step"], "must return (model, args)"),
        (["check", "little_step:no_loss", "--budget", "1MB"], "return (model, args, loss)"),
        (["inspect", "little_step:misnamed"], "loss names one of 0, 1, 2, 'mean', 'square', 'hidden'"),
        (["explain", "little_step.py"], "little_step.py"),
    ],
)
def test_what_cannot_be_done_is_said(
    model: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert model
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.torch
@pytest.mark.parametrize("function", ["named", "keywords"])
def test_a_step_takes_keyword_arguments_and_names_its_loss(
    model: str, function: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = f"{model.partition(':')[0]}:{function}"
    checked = _json_of(capsys, "check", target, "--budget", "1MiB", "--steps", "1")
    assert checked["holds"] is True
    eager = _json_of(capsys, "inspect", target, "--measure", "--no-probe")["eager"]
    assert isinstance(eager, dict)
    assert eager["measured_peak_bytes"]
