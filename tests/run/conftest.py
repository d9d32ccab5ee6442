"""Fixtures of the tests that run PyTorch."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch on a single thread: with more, kernels choose others and keep partial results apart."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
