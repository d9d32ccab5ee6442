"""The largest size within a budget: the search ends at the border, each answer is a plan that was made."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stowplan import Execution, Search
from stowplan.cli.main import main
from stowplan.plan.options import PlanOptions
from stowplan.run.largest import Fit, SizeAttempt, largest_of, last_that_fits
from stowplan.run.planning import plan_cache
from stowplan.run.planning.planner import DraftedStep, Subject, draft_step

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

_STEP = """
import torch
from torch import nn

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(64, 64), nn.Tanh())))

    def forward(self, x):
        return self.layers(x).square().mean()

def step(batch=64):
    return Deep(), (torch.randn(batch, 64),)

def fixed():
    return step()
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of its own for each test, found in the working directory."""
    name = f"deep_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(_STEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return f"{name}:step"


@given(
    st.integers(1, 10**6),
    st.integers(0, 10**9),
    st.integers(0, 10**12),
    st.sampled_from((0.5, 1.0, 1.7, 2.0)),
)
@pytest.mark.slow
def test_the_search_ends_at_the_border(slope: int, base: int, allowed: int, power: float) -> None:
    """For needs that grow in any smooth way, not only in a line."""

    def attempt(step: int) -> SizeAttempt:
        need = base + round(slope * step**power)
        return SizeAttempt(need, Fit(step, need, 1.0, 1.0) if need <= allowed else None)

    fit, after = last_that_fits(attempt, allowed, limit=10**4)
    if fit is None:
        assert base > allowed
        return
    assert fit.projected_peak_bytes <= allowed
    assert fit.size == 10**4 or (after is not None and after > allowed)
    assert after is None or after == attempt(fit.size + 1).needed_bytes


@pytest.mark.slow
def test_techniques_make_room(target: str) -> None:
    plain, recompute = largest_of(
        target, 500_000, allow=["recompute"], multiple=64, most=2000, search=Search(moves=20)
    )
    assert plain.fit is not None
    assert recompute.fit is not None
    assert plain.techniques == ()
    assert recompute.fit.size > plain.fit.size
    assert plain.next_needs_bytes is not None
    assert plain.fit.projected_peak_bytes <= 500_000 < plain.next_needs_bytes
    assert recompute.fit.projected_peak_bytes <= 500_000


@pytest.mark.slow
def test_the_verb_prints_the_table(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit-largest", target, "--multiple", "64", "--moves", "20", "--allow"]
    assert main([*words, "", "--budget", "500kB"]) == 0
    assert "\neager " in capsys.readouterr().out
    assert main([*words, "recompute", "--budget", "500kB", "--most", "128", "--json"]) == 0
    plain, recompute = json.loads(capsys.readouterr().out)
    assert plain["batch"] <= recompute["batch"] <= 128
    assert plain["seconds_per_sample"] > 0
    assert main([*words, "tile", "--budget", "500kB", "--most", "128", "--optimizer", "adamw", "--json"]) == 0
    (iteration,) = json.loads(capsys.readouterr().out)
    assert (
        iteration["batch"] < plain["batch"]
        or iteration["projected_peak_bytes"] > plain["projected_peak_bytes"]
    )
    assert main([*words, "", "--budget", "1kB"]) == 1


@pytest.mark.slow
def test_plans_come_from_the_cache_that_fit_reads(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()

    def noted(subject: Subject, allowed_bytes: int, options: PlanOptions) -> DraftedStep:
        found = draft_step(subject, allowed_bytes, options)
        made.append(found.draft.allowed_bytes)
        return found

    monkeypatch.setattr(plan_cache, "draft_step", noted)
    how: dict[str, Any] = {"multiple": 64, "most": 256, "allow": ("recompute",), "search": Search(moves=5)}
    sizes = list(largest_of(target, 500_000, **how))
    assert made
    made.clear()
    assert list(largest_of(target, 500_000, **how)) == sizes
    assert not made


@pytest.mark.slow
def test_plans_may_have_compiled_kernels(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = set[str]()

    def noted(subject: Subject, allowed_bytes: int, options: PlanOptions) -> DraftedStep:
        asked.add(options.execution.kernels)
        return draft_step(subject, allowed_bytes, replace(options, execution=Execution()))

    monkeypatch.setattr(plan_cache, "draft_step", noted)
    words = ["--multiple", "64", "--moves", "5", "--most", "256", "--allow", "recompute", "--budget", "500kB"]
    assert main(["fit-largest", target, *words, "--kernels", "compiled"]) == 0
    assert asked == {"compiled"}


def test_kernels_for_another_device_are_refused(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit-largest", target, "--device", "a100-80gb", "--kernels", "compiled"]) == 2
    assert "--kernels compiled is for this machine" in capsys.readouterr().err


def test_a_function_without_the_size_is_refused(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit-largest", target.replace("step", "fixed"), "--budget", "1MB"]) == 2
    assert "def step(batch=1)" in capsys.readouterr().err
