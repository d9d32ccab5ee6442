"""MODULE:FUNCTION, as the command line names a living training step."""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from inspect import isfunction
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stowplan.capture import capture
from stowplan.capture.composite import opened
from stowplan.capture.origins import line_of
from stowplan.capture.recording import Loss
from stowplan.capture.stand_ins import flatten
from stowplan.errors import BadUse, nearest
from stowplan.request import Iteration
from stowplan.run.optimizers import optimizer_named
from stowplan.run.planning.planner import Subject
from stowplan.torch_private import pytree
from stowplan.watch import tell_phase


@dataclass(frozen=True, slots=True)
class Target:
    """The result of the function: the call `model(*args, **kwargs)`, and its loss.

    The loss is a function of the model's output, or the name or index of the output that is the loss. Without
    it, the model returns its loss.
    """

    model: nn.Module
    args: tuple[object, ...]
    kwargs: Mapping[str, object] = field(default_factory=dict)
    loss: Loss | None = None

    def tensors_before(self, model: nn.Module) -> list[Tensor]:
        """The tensors that exist before a step of this call, by `model` or a copy of it."""
        leaves = flatten(self.args, self.kwargs)[0]
        given = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        return [*opened((*model.parameters(), *model.buffers())), *given]


def subject_of(target: Target) -> Subject:
    """The captured step of a target."""
    tell_phase("capturing ops")
    captured = capture(target.model, target.args, target.kwargs, loss=target.loss, know_values=True)
    return Subject(captured, target.model, target.args, target.kwargs, loss=target.loss)


def with_batches(target: Target, times: int) -> Target:
    """The step on a batch `times` as large, without contents."""
    call = target.args, dict(target.kwargs)
    args, kwargs = pytree.tree_map(lambda leaf: _longer(leaf, times), call)
    return replace(target, args=args, kwargs=kwargs)


def _longer(leaf: object, times: int) -> object:
    if not isinstance(leaf, Tensor) or leaf.ndim == 0:
        return leaf
    return torch.empty((leaf.shape[0] * times, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")


def load_target(text: str, **settings: int) -> Target:
    """Import the module (the working directory counts) and call the function, with `settings` by name."""
    tell_phase("loading")
    function = function_named(text)
    with _told(text, "python -c 'import {0}; {0}.{1}()'"):
        returned = function(**settings)
    return _checked(text, returned)


def load_optimizer(text: str, model: nn.Module) -> Optimizer:
    """A name of torch.optim, or MODULE:FUNCTION, which takes the model and returns its optimizer."""
    if ":" not in text:
        return optimizer_named(text, model.parameters())
    function = function_named(text)
    with _told(text, "python -c 'import {0}'"):
        made = function(model)
    if not isinstance(made, Optimizer):
        raise BadUse(f"{text} must return an optimizer of the model it is given, not {type(made).__name__}")
    return made


def load_iteration(asked: Iteration, model: nn.Module) -> Iteration:
    """The same with the optimizer itself, where its name was given."""
    optimizer = asked.optimizer
    return replace(asked, optimizer=load_optimizer(optimizer, model)) if isinstance(optimizer, str) else asked


def function_named(text: str) -> Callable[..., object]:
    """The function itself."""
    module_name, _, function_name = text.rpartition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        with _told(text, "python -c 'import {0}'"):
            module = importlib.import_module(module_name)
    finally:
        sys.path.pop(0)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise BadUse(
            f"{text}: {module.__file__} has no function {function_name!r}{_there(module, function_name)}"
        )
    found: Callable[..., object] = function
    return found


def _there(module: ModuleType, wanted: str) -> str:
    """The names that the module has instead."""
    own = (
        value for value in vars(module).values() if isfunction(value) and value.__module__ == module.__name__
    )
    names = [function.__name__ for function in own if not function.__name__.startswith("_")]
    return f"{nearest(wanted, names)}; it has {', '.join(names[:8])}" if names else ""


@contextmanager
def _told(text: str, alone: str) -> Iterator[None]:
    """Turn an error of the user's code into one line with its place, and how to see it without stowplan."""
    module, _, function = text.rpartition(":")
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name == module.partition(".")[0]:
            raise BadUse(
                f"{text}: there is no module {error.name!r} in {Path.cwd()}; run from its folder"
            ) from None
        raise BadUse(f"{text}: {line_of(error)}: {error}; pip install it, or run where it is") from error
    except SyntaxError as error:
        raise BadUse(f"{text}: {error.filename}:{error.lineno}: {error.msg}") from error
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        where = f"{line_of(error)}: ".removeprefix(": ")
        raise BadUse(f"{text}: {where}{told}; try {alone.format(module, function)}") from error


def _checked(text: str, returned: object) -> Target:
    if isinstance(returned, tuple) and 2 <= len(returned) <= 4:
        model, args, *more = returned
        kwargs = more.pop(0) if more and isinstance(more[0], Mapping) else {}
        loss = more.pop(0) if more else None
        is_loss = loss is None or callable(loss) or isinstance(loss, str | int)
        if isinstance(model, nn.Module) and isinstance(args, tuple | list) and is_loss and not more:
            return Target(model, tuple(args), kwargs, loss)
    raise BadUse(
        f"{text} must return (model, args), optionally with a dict of keyword arguments and a loss after it:"
        " (model, args, kwargs, loss). args is a tuple; loss is a function of the model's output, or the name"
        " or index of the output that is the loss"
    )
