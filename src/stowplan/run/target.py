"""MODULE:FUNCTION, as the command line names a living training step."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from stowplan.capture import capture
from stowplan.errors import BadUse
from stowplan.run.tiles.ways import Subject


@dataclass(frozen=True, slots=True)
class Target:
    """What the function returned: `model(*args)`, or `loss(model(*args))`, is differentiated."""

    model: nn.Module
    args: tuple[object, ...]
    loss: Callable[[object], Tensor] | None = None


def subject_of(target: Target) -> Subject:
    """The captured step of a target."""
    captured = capture(target.model, target.args, loss=target.loss)
    return Subject(captured, target.model, target.args, {})


def load_target(text: str, **settings: int) -> Target:
    """Import the module (the working directory counts) and call the function, with `settings` by name."""
    return _checked(text, function_named(text)(**settings))


def function_named(text: str) -> Callable[..., object]:
    """The function itself."""
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
    found: Callable[..., object] = function
    return found


def _checked(text: str, returned: object) -> Target:
    if isinstance(returned, tuple) and 2 <= len(returned) <= 3:
        model, args, *loss = returned
        if isinstance(model, nn.Module) and isinstance(args, tuple | list) and all(map(callable, loss)):
            return Target(model, tuple(args), *loss)
    raise BadUse(f"{text} must return (model, args) or (model, args, loss), with args a tuple")
