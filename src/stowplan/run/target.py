"""MODULE:FUNCTION, as the command line names a living training step."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from stowplan.errors import BadUse


@dataclass(frozen=True, slots=True)
class Target:
    """What the function returned: `model(*args)`, or `loss(model(*args))`, is differentiated."""

    model: nn.Module
    args: tuple[object, ...]
    loss: Callable[[object], Tensor] | None = None


def load_target(text: str) -> Target:
    """Import the module (the working directory counts) and call the function."""
    module_name, _, function_name = text.rpartition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise BadUse(f"{text}: cannot import {module_name!r} from {Path.cwd()}: {error}") from error
    finally:
        sys.path.pop(0)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise BadUse(f"{text}: module {module_name!r} has no function {function_name!r}")
    return _checked(text, function())


def _checked(text: str, returned: object) -> Target:
    if isinstance(returned, tuple) and 2 <= len(returned) <= 3:
        model, args, *loss = returned
        if isinstance(model, nn.Module) and isinstance(args, tuple | list) and all(map(callable, loss)):
            return Target(model, tuple(args), *loss)
    raise BadUse(f"{text} must return (model, args) or (model, args, loss), with args a tuple")
