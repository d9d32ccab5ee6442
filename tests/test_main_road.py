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
TECHNIQUES = ("tiles", "offload", "shards")
MOST_LOADED, MOST_RUN = 70, 46  # modules of ours; lower them as the road gets shorter

UNTILED = """
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


stowplan.fit  # import first: functions that run during imports are not part of the road
ran = set()


def note(frame, event, _):
    if event == "call" and ROOT in frame.f_code.co_filename:
        ran.add(frame.f_code.co_filename)


ROOT = {root!r}
x = torch.randn(512, 64)
sys.setprofile(note)
fitted = stowplan.fit(Chain(), (x,), budget=900_000, moves=3, allow=("recompute",))
fitted(x).backward()
sys.setprofile(None)
loaded = [name for name in sys.modules if name.split(".")[0] == "stowplan"]
print(json.dumps([loaded, sorted(ran)]))
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


def test_a_fit_without_techniques_loads_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # less runs where plans and probes are known
    found = _python(UNTILED.replace("{root!r}", repr(str(SOURCE))), SOURCE.parent)
    loaded, ran = json.loads(found)
    techniques = [name for name in loaded if not set(name.split(".")).isdisjoint((*TECHNIQUES, "kernels"))]
    assert not techniques
    assert not [name for name in loaded if "arena" in name]
    with capsys.disabled():
        print(f"\nmodules of an untiled fit: {len(loaded)} loaded, {len(ran)} run")
    assert len(loaded) <= MOST_LOADED
    assert len(ran) <= MOST_RUN


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_without_a_technique_the_rest_works(technique: str, tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "stowplan", ignore=shutil.ignore_patterns("__pycache__"))
    for layer in ("plan", "run"):
        shutil.rmtree(tmp_path / "stowplan" / layer / technique)
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
        "tiles": ("plan/shards", "run/test_offload.py"),
        "offload": ("plan/test_tiles.py", "plan/shards"),
        "shards": ("plan/test_tiles.py", "run/test_offload.py"),
    }[technique]
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
