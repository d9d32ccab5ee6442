"""Tests on the stand-in device, in a process of their own: once loaded, it is the process's accelerator.

`pytest tests/device` runs them. In a run of all tests, `tests/test_stand_in.py` starts them.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support import device as stand_in

_HERE = Path(__file__).parent


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Only a run of nothing else collects them."""
    asked = [Path(arg.partition("::")[0]).resolve() for arg in config.args]
    is_alone = bool(asked) and all(path == _HERE or _HERE in path.parents for path in asked)
    return None if is_alone else True


@pytest.fixture(scope="session", autouse=True)
def loaded() -> None:
    """The device, built before if it can be."""
    if reason := stand_in.why_not():
        pytest.skip(reason)
    stand_in.load()
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_faults(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test may leave a missing wait or a use after free behind, nor a delay or a small device."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    stand_in.take_faults()
    torch.manual_seed(0)
    yield
    torch.accelerator.synchronize()
    stand_in.reset()
    assert stand_in.take_faults() == []


@pytest.fixture
def device() -> torch.device:
    """The first of the two devices."""
    return torch.device(stand_in.NAME, 0)
