"""Stand-ins for a model: its own parts, parameters and all, seen as an instance of another class."""

from collections.abc import Callable
from typing import Any

from torch import nn


def with_forward(model: nn.Module, forward: Callable[..., object]) -> nn.Module:
    """The model with another forward, to be captured. Its hooks run around a step, not in it: it has none."""
    own = {"forward": forward, "__module__": type(model).__module__}
    kind = type(type(model).__name__, (type(model),), own)
    found: nn.Module = seen_as(kind, model)
    vars(found).pop("forward", None)  # one that wraps the planned step, and would be called in its place
    for name, value in vars(found).items():
        if name.endswith("_hooks") and "forward" in name:
            vars(found)[name] = type(value)()
    return found


def seen_as(kind: type, model: nn.Module) -> Any:
    """The model's own parts as an instance of `kind`. Nothing of the class is run, as a copy would."""
    seen: object = object.__new__(kind)
    vars(seen).update(vars(model))
    return seen
