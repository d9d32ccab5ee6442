"""Fixtures shared by all tests."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples each time, for two runs of the tests on one code must say the same. Others are drawn with
# `--hypothesis-profile=fresh`. Slow examples are no failure on a shared machine; hangs end with the timeout.
settings.register_profile("fresh", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("fresh"), derandomize=True)
settings.load_profile("same")

_ROOT = Path(__file__).resolve().parents[1]

_SECONDS = 900  # for a test: a busy machine takes several times as long

os.environ.pop("COLUMNS", None)  # outputs are compared at the width that a pipe gets


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests end in time. This is no setting of the project: examples run where no plugin reads it."""
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_SECONDS))


@pytest.fixture(scope="session", autouse=True)
def _temporary_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Folders that processes of a test share lie where pytest removes them later."""
    tempfile.tempdir = str(tmp_path_factory.getbasetemp())


@pytest.fixture(autouse=True)
def _nothing_of_the_users_is_changed() -> None:
    """Every `fit` of every test is compared before and after; see `tests/support/untouched.py`."""
    if "stowplan.run.fit" in sys.modules:  # most tests of formats and plans run without PyTorch
        from tests.support.untouched import audit

        audit()


@pytest.fixture(scope="session")
def dump() -> Callable[[str], Path]:
    """The path of a file that another system wrote, by the name of its format."""

    def find(name: str) -> Path:
        is_example = name == "chainer"  # the commands of the README read it too
        return _ROOT / "examples/data/unet_step.txt" if is_example else _ROOT / f"tests/data/{name}.txt"

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
