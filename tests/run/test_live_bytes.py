"""Ordinary loops, counted below PyTorch: none takes more than its budget before the user has heard of it."""

from pathlib import Path

import pytest

from tests.support.budget_cases import is_small, run_in_processes
from tests.support.live_bytes import counting_library

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SEEDS = [seed for seed in range(1000) if is_small(seed)][:1]  # `make budgets` runs more


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return counting_library(tmp_path_factory.mktemp("count"))


@pytest.mark.parametrize("seed", SEEDS)
def test_no_loop_exceeds_its_budget_in_silence(seed: int, library: Path) -> None:
    (outcome,) = run_in_processes([seed], library)
    assert not outcome.is_silent, outcome
