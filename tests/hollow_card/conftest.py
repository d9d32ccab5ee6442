"""Tests on the hollow card, in the environment that `make hollow-card` makes: nothing else collects them."""

import gc
import os

import pytest

from tests.hollow_card import LIBRARIES


def pytest_ignore_collect() -> bool | None:
    """Without the card there is no CUDA here, or a real one."""
    return None if LIBRARIES in os.environ else True


@pytest.fixture(autouse=True)
def as_new(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty allocator without workspaces of cuBLAS, and plans that are not kept for the user."""
    import torch

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    torch.manual_seed(0)
    torch.empty(1, device="cuda")  # PyTorch counts from the first allocation on
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
