"""Refusals as a user meets them: what happened, where in their code, what to try; no traceback."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import stowplan
from stowplan import Search
from stowplan.cli.main import main
from stowplan.errors import BadUse, BudgetTooSmall

pytestmark = pytest.mark.torch

_STEPS = """
import torch
from torch import nn


@torch.library.custom_op("refusals::shapeless", mutates_args=())
def shapeless(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("refusals::oneway", mutates_args=())
def oneway(x: torch.Tensor) -> torch.Tensor:
    return x * 2


oneway.register_fake(torch.empty_like)


class Net(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.first, self.second, self.between = nn.Linear(16, 16), nn.Linear(16, 16), between

    def forward(self, x):
        y = self.first(x)
        y = self.between(y)  # here
        return self.second(y).square().mean()


def _step(between):
    return Net(between), (torch.randn(64, 16),)


def fine(): return _step(torch.relu)
def branch(): return _step(lambda y: -y if y.sum() > 0 else y)  # here
def index(): return _step(lambda y: y[y[:, 0] > 0])  # here
def array(): return _step(lambda y: y * float(y.detach().numpy().mean()))  # here
def unknown(): return _step(shapeless)
def blocked(): return _step(oneway)
def wrong(): return _step(lambda y: y[:, :3])
def fails(): raise KeyError("config")  # here
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "refused_steps.py").write_text(_STEPS)
    (tmp_path / "needs_more.py").write_text("import there_is_no_such_package\n")
    (tmp_path / "misspelled.py").write_text("def step(:\n")
    return tmp_path


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a refused command says, in at most four lines of a terminal."""
    assert main(words) in (1, 2)
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    assert said.err.startswith("stowplan: ")
    assert said.err.count("\n") == 1
    assert len(said.err) < 6 * 100
    return said.err


@pytest.mark.parametrize(
    ("step", "what", "advice"),
    [
        ("branch", "reads the values of a tensor", 'torch.compile(model, backend="stowplan"'),
        ("index", "shape of a tensor depends on values", 'torch.compile(model, backend="stowplan"'),
        ("array", "reads the values of a tensor", "remove .numpy()"),
        ("unknown", "an op does not define the shape of its output", "register_fake"),
        ("blocked", "an op cannot be differentiated", "register_autograd"),
        ("wrong", "RuntimeError: a and b must have same reduction dim", "runs in eager"),
        ("fails", "KeyError: 'config'", "python -c 'import refused_steps; refused_steps.fails()'"),
    ],
)
def test_what_happened_where_and_what_to_try(
    step: str, what: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, "inspect", f"refused_steps:{step}")
    assert what in said
    assert advice in said
    place = re.search(r"refused_steps\.py:(\d+)", said)
    assert place is not None
    assert "# here" in _STEPS.splitlines()[int(place[1]) - 1] or step == "wrong"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("plan", "refused_steps:none", "--budget", "1MiB"), ("no function 'none'", "it has fine, branch")),
        (("plan", "nowhere:step", "--budget", "1MiB"), ("no module 'nowhere'", "run from its folder")),
        (("plan", "needs_more:step", "--budget", "1MiB"), ("needs_more.py:1", "there_is_no_such_package")),
        (("plan", "misspelled:step", "--budget", "1MiB"), ("misspelled.py:1", "invalid syntax")),
        (("plan", "refused_steps:fine", "--budget", "six"), ("'six' is not a size", "6GiB")),
        (("plan", "refused_steps:fine", "--budget", "1MiB", "-o", "no/p.json"), ("no folder",)),
        (("inspect", "nothing.txt"), ("nothing.txt", "does not exist", "MODULE:FUNCTION")),
        (("inspect", "refused_steps.py"), ("is Python", "refused_steps:FUNCTION")),
        (("explain", "nothing.json", "x"), ("No such file", "--budget BYTES -o PLAN")),
        (("simulate", "refused_steps:fine", "--mesh", "space=2"), ("'space'", "no dim", "64x16")),
        (("simulate", "refused_steps:fine", "--mesh", "rings=2"), ("'rings'", "data, space, sequence")),
    ],
)
def test_wrong_words(
    words: tuple[str, ...], told: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, *words)
    for part in told:
        assert part in said


@pytest.mark.slow
def test_a_budget_that_is_too_small_tells_the_line_and_the_next_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = refusal(capsys, "plan", "refused_steps:fine", "--budget", "9kB", "--allow", "recompute")
    assert re.search(r"needs [\d.]+ KiB \(\d+ bytes\) at \w+ \(.*refused_steps\.py:\d+\)", said)
    assert "--frontier" in said
    said = refusal(capsys, "plan", "refused_steps:fine", "--budget", "1kB", "--allow", "recompute")
    assert "alone take 8.25 KiB" in said
    assert "--frontier" in said


@pytest.mark.slow
def test_a_plan_where_a_graph_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "refused_steps:fine", "--budget", "1MiB", "-o", "fine.json"]) == 0
    capsys.readouterr()
    assert "explain and report read it" in refusal(capsys, "inspect", "fine.json")


class Little(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = torch.relu(self.layer(x)).square().mean()
        return loss


def test_misuse_of_fit() -> None:
    x = torch.randn(64, 16)
    with pytest.raises(BadUse, match=r"fit\(model, \(x, y\), budget=\.\.\.\)"):
        stowplan.fit(Little(), x, budget="1MiB")  # type: ignore[arg-type]
    with pytest.raises(BadUse, match=r"torch\.nn\.Module, not builtin"):
        stowplan.fit(torch.relu, (x,), budget="1MiB")  # type: ignore[type-var]
    with pytest.raises(BadUse, match="of what fit returns"):
        stowplan.plans_of(Little())


@pytest.mark.slow
def test_a_shape_that_does_not_fit_is_told_when_it_comes() -> None:
    model = stowplan.fit(Little(), (torch.randn(64, 16),), budget="1MiB", search=Search(moves=20))
    with pytest.raises(BudgetTooSmall) as refused:
        model(torch.randn(64_000, 16))
    (note,) = refused.value.__notes__
    assert "64000x16" in note
    assert "pad" in note
