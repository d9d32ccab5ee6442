"""torchrun as the supervisor: when a worker is lost it starts all again, and they end with the same bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples import sharded_parameters
from examples.several_workers import STEPS, train
from tests.support.workers.processes import on_workers

pytestmark = [pytest.mark.torch, pytest.mark.distributed]

ROOT = Path(__file__).parents[4]
BUDGET = "7MiB"


def under_torchrun(example: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    supervisor = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*supervisor, "--max-restarts=2", "-m", f"examples.{example}", str(folder), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_a_training_that_torchrun_starts_again_ends_with_the_bits_of_one_that_was_left_alone(
    tmp_path: Path,
) -> None:
    alone, *others = on_workers(2, train, tmp_path / "alone", BUDGET)
    assert others == [alone]
    done = under_torchrun("several_workers", tmp_path / "lost", "--budget", BUDGET, "--lose-worker-in", "4")
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"after 1 restarts: parameters {alone}" in done.stdout, done.stderr[-6000:]
    steps = [line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("step")]
    assert steps == [f"step {number}" for number in range(1, STEPS + 1)]  # none was done twice


def test_sharded_parameters_go_on_with_another_number_of_workers(tmp_path: Path) -> None:
    done = under_torchrun("sharded_parameters", tmp_path, "--steps", "2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["step 1", "step 2"]
    (losses,) = on_workers(1, sharded_parameters.train, tmp_path, "8MiB", 3)
    assert [*losses] == [3]
