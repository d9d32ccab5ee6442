"""The road of a fit without techniques: it loads none of them, and each can be deleted."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import stowplan

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SOURCE = Path(stowplan.__file__).parent
TESTS = Path(__file__).parent
TECHNIQUES = ("tiles", "offload", "shards", "kernels", "arena", "held_blocks", "devices", "iteration")

MODEL = """
import json, sys
import torch
from torch import nn

import stowplan


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))

    def forward(self, x):
        return self.layers(x).square().mean()


x = torch.randn(512, 64)
"""
UNTILED = f"""{MODEL}
fitted = stowplan.fit(Chain(), (x,), budget=900_000, search=stowplan.Search(moves=3), allow=("recompute",))
fitted(x).backward()
print(json.dumps([name for name in sys.modules if name.split(".")[0] == "stowplan"]))
"""


def _python(code: str, source: Path) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code], env=_environment(source), capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


def _environment(source: Path) -> dict[str, str]:
    paths = [str(source), str(TESTS.parent)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def test_a_fit_without_techniques_loads_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # less is loaded where plans and probes are known
    loaded = json.loads(_python(UNTILED, SOURCE.parent))
    assert not [name for name in loaded if name.startswith("stowplan.techniques.")]


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_without_a_technique_the_rest_works(technique: str, tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "stowplan", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "stowplan" / "techniques" / technique)
    tests = (
        "ir",
        "plan/test_ledger.py",
        "plan/test_simulate.py",
        "plan/test_plan_file.py",
        "run/test_generated_source.py",
        "run/test_two_forwards.py",
        "run/test_updated_buffers.py",
        "test_units.py",
    )
    others = {
        "tiles": ("techniques/shards/plan", "run/test_offload.py"),
        "offload": ("plan/test_tiles.py", "techniques/shards/plan"),
        "shards": ("plan/test_tiles.py", "run/test_offload.py"),
    }.get(technique, ())
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow and not timing",
        ]
        + [str(TESTS / name) for name in (*tests, *others)],
        env=_environment(tmp_path),
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:]


DEPTH = f"""{MODEL}
from stowplan.plan.judge import verify

depths = []


def count(frame, event, _):
    if event == "call" and frame.f_code is verify.verify.__code__ and not depths:
        calls = 1
        while frame.f_code is not stowplan.fit.__wrapped__.__code__:
            frame = frame.f_back
            calls += "stowplan" in frame.f_code.co_filename
        depths.append(calls)


sys.setprofile(count)
stowplan.fit(Chain(), (x,), budget=900_000, search=stowplan.Search(moves=3))
sys.setprofile(None)
print(depths[0])
"""
MOST_CALLS = 10
"""From `fit` to `verify`, both counted. It was 17 to the first plan, and shall be 8."""


def test_the_road_from_fit_to_a_plan_is_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert int(_python(DEPTH, SOURCE.parent)) <= MOST_CALLS
