"""Stand-ins for a model: its own parts, parameters and all, seen as an instance of another class."""

import inspect
from collections.abc import Callable
from functools import update_wrapper
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


def fitted_class(kind: type[nn.Module], fitted: type[nn.Module]) -> type[nn.Module]:
    """`kind` with the methods of `fitted` before its own, under the same name, with forward's signature.

    Trainers choose the columns of a batch by the signature; `save_pretrained` writes the name of the class.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return fitted.forward(self, *args, **kwargs)

    update_wrapper(forward, kind.forward)
    del vars(forward)["__wrapped__"]  # what it stands for is not to be called in its place
    if callable(kind.forward):  # for TorchScript it is a property
        vars(forward)["__signature__"] = inspect.signature(kind.forward)
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (fitted, kind), {**own, "forward": forward})


def seen_as(kind: type, model: nn.Module) -> Any:
    """The model's own parts as an instance of `kind`. Nothing of the class is run, as a copy would."""
    seen: object = object.__new__(kind)
    vars(seen).update(vars(model))
    return seen
