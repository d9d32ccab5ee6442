"""Synthetic batches that many entries take."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Generator, Tensor

Draw: TypeAlias = Callable[[Generator], tuple[Any, ...]]


def words(vocabulary: int, *shape: int, first: int = 0) -> Callable[[Generator], Tensor]:
    """Random words."""
    return lambda draw: torch.randint(first, vocabulary, shape, generator=draw)


def numbers(*shape: int) -> Callable[[Generator], Tensor]:
    """Normal numbers."""
    return lambda draw: torch.randn(*shape, generator=draw)


def pixels(*shape: int) -> Callable[[Generator], Tensor]:
    """Numbers from 0 to 1."""
    return lambda draw: torch.rand(*shape, generator=draw)


def batches(*draws: Callable[[Generator], Any]) -> Draw:
    """A batch of what each draws."""
    return lambda draw: tuple(each(draw) for each in draws)
