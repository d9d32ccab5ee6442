"""Copies of what a step leaves, and whether two of them are equal to the bit."""

from typing import Any

import torch
from torch import Tensor


def copied(value: Any) -> Any:
    """Equal for equal contents: a tensor as its values, flags and gradient."""
    if isinstance(value, Tensor):
        gradient = value.grad if value.is_leaf else None
        return value.detach().clone(), value.requires_grad, None if gradient is None else gradient.clone()
    if isinstance(value, dict):
        return [(key, copied(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [copied(item) for item in value]
    return [type(value), copied(vars(value))] if hasattr(value, "__dict__") else value


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)
