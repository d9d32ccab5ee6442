"""Fixtures shared by all tests."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The machine that runs the tests is shared: a slow example is not a failure, a hang is the timeout's affair.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")

_DEFAULT_SEEDS = Path(__file__).resolve().parents[2] / "shared" / "seeds"


@pytest.fixture(scope="session")
def seeds() -> Callable[[str], Path]:
    """The path of one of the five documents by its number; without them, CI fails and others skip."""

    def find(number: str) -> Path:
        folder = Path(os.environ.get("STOWPLAN_SEEDS", _DEFAULT_SEEDS))
        found = sorted(folder.glob(f"{number}_*.txt"))
        if not found:
            missing = pytest.fail if os.environ.get("CI") else pytest.skip
            missing(f"document {number} is not in {folder}; set STOWPLAN_SEEDS")
        return found[0]

    return find


@pytest.fixture
def step_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Writes a module with a function `step` into an empty working directory and returns MODULE:FUNCTION."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def write(module: str, source: str) -> str:
        (tmp_path / f"{module}.py").write_text(source)
        return f"{module}:step"

    return write


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch on a single thread: with more, kernels choose others and keep partial results apart."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
