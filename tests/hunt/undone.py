"""Repairs of one class of silent faults each, taken back: a hunter that is worth its time finds all of them.

python -m tests.hunt.undone                        every class, for up to 30 minutes each, and a table
python -m tests.hunt.undone --only states outputs  some of them
python -m tests.hunt --plant states --minutes 30   one, with the cases shrunk

Each entry patches the check or the mechanism that mended its class out of stowplan. The hunter's cases, its
prices and its order stay as they are. A class counts as found when a case has a verdict that is a finding.
"""

import argparse
import itertools
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from types import FunctionType, MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from stowplan.capture import changes, recording, watching
from stowplan.capture.generators import WatchedGenerator
from stowplan.capture.stand_ins import torch_dtype
from stowplan.run import wrappers
from stowplan.run.border import frozen
from stowplan.run.border.frozen import Picture, Same
from stowplan.run.step import function
from stowplan.run.step.function import Run
from stowplan.run.step.incoming import IncomingGradients
from stowplan.run.step.presence import Presence
from stowplan.techniques.iteration.run import one_by_one
from tests.support.machine import same_everywhere

from .children import Child
from .plants import Plant


@contextmanager
def _states() -> Iterator[None]:
    """Seeds and states of PyTorch's generator that forward sets are not recorded."""
    own = "_own"
    with ExitStack() as stack:
        for name, instead in (
            ("state", lambda watched: getattr(watched, own).get_state()),
            ("set_state", lambda watched, state: getattr(watched, own).set_state(state)),
            ("seed", lambda watched, seed: getattr(watched, own).manual_seed(seed)),
        ):
            stack.enter_context(patch.object(WatchedGenerator, name, instead))
        yield


class _Latch(torch.autograd.Function):
    """A node above that of an output: what hooks see and return there has no part in the gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, came: list[Tensor]) -> Tensor:
        ctx.came = came
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.came.pop(), None


@contextmanager
def _outputs() -> Iterator[None]:
    """Hooks on outputs see memory that nobody wrote, and what they return is ignored."""
    plain = function._call_output
    latch: Callable[..., Tensor] = _Latch.apply

    def call(*args: Any) -> Tensor:
        came: list[Tensor] = []
        latched = latch(plain(*args), came)

        def take(gradient: Tensor) -> Tensor:
            came.append(gradient)
            return torch.full_like(gradient, 1e30)

        latched.register_hook(take)  # type: ignore[no-untyped-call]
        return latched

    with patch.object(function, "_call_output", call):
        yield


@contextmanager
def _storages() -> Iterator[None]:
    """Nobody sees that forward binds a parameter or a buffer to other memory."""
    with patch.object(recording._Recorder, "_replaced", lambda *_: {}):
        yield


@contextmanager
def _heads() -> Iterator[None]:
    """Parameters that no output in use depends on get zeros as gradients."""
    made, suited = Presence.__init__, IncomingGradients.suited

    def init(presence: Presence, *args: Any) -> None:
        made(presence, *args)
        presence._sources = {}

    def zeros_for_missing(incoming: IncomingGradients, gradients: list[Tensor | None]) -> list[Tensor | None]:
        tensors = (incoming._captured.graph.tensors[name] for name in incoming._names)
        found = suited(incoming, gradients)
        return [
            torch.zeros(tensor.shape or (), dtype=torch_dtype(tensor.dtype)) if each is None else each
            for each, tensor in zip(found, tensors, strict=True)
        ]

    reaches = patch.object(
        IncomingGradients,
        "reaches",
        lambda incoming, came: dict.fromkeys(incoming._captured.program.gradients, bool(came)),
    )
    with (
        patch.object(Presence, "__init__", init),
        patch.object(IncomingGradients, "suited", zeros_for_missing),
        reaches,
    ):
        yield


@contextmanager
def _arguments() -> Iterator[None]:
    """What forward writes into the containers among its arguments is lost."""
    with patch.object(changes.Containers, "rewritten", lambda *_: iter(())):
        yield


@contextmanager
def _own_calls() -> Iterator[None]:
    """A `__call__` of the class is captured, and then runs around the step as well."""
    plain = wrappers.with_forward

    def with_forward(model: nn.Module, forward: Callable[..., object]) -> nn.Module:
        found = plain(model, forward)
        type(found).__call__ = type(model).__call__  # type: ignore[method-assign]
        return found

    with _everywhere(plain, with_forward), _everywhere(wrappers.overrides_call, lambda _: False):
        yield


@contextmanager
def _everywhere(known: Callable[..., Any], instead: Callable[..., Any]) -> Iterator[None]:
    """Replace a function in each module of stowplan that has it."""
    holders = [(module, name) for module in _modules() for name, it in vars(module).items() if it is known]
    with ExitStack() as stack:
        for module, name in holders:
            stack.enter_context(patch.object(module, name, instead))
        yield


def _modules() -> list[Any]:
    return [module for name, module in list(sys.modules.items()) if name.startswith("stowplan.")]


@contextmanager
def _places() -> Iterator[None]:
    """Slots, bound methods, closures, defaults and partials are not opened: only `__dict__` is."""
    opened = Picture._opened

    def not_opened(picture: Picture, value: object, label: str) -> frozen.Frozen:
        closed = isinstance(value, (FunctionType, MethodType, partial))
        return Same(value) if closed else opened(picture, value, label)

    with patch.object(Picture, "_opened", not_opened), patch.object(frozen, "_slots_of", lambda _: ()):
        yield


@contextmanager
def _optimizers() -> Iterator[None]:
    """An optimizer is tried on a few small finite gradients alone."""
    with patch.object(one_by_one, "_COMPARED", (one_by_one._Steps((1.0, 1.0)),)):
        yield


@contextmanager
def _marks() -> Iterator[None]:
    """`requires_grad` and `.grad` that forward sets are not set by a call of the plan."""

    def without_marks(_flags: object = (), _cleared: object = (), *others: Any) -> changes.Changes:
        return changes.Changes((), (), *others)

    with patch.object(recording, "Changes", without_marks):
        yield


@contextmanager
def _profiles() -> Iterator[None]:
    """Probes use the one profiler of the process, although the user's is running."""
    measure = import_module("stowplan.run.measure.measure")  # its package has a function of this name
    with (
        patch.object(measure, "is_profiled", lambda: False),
        patch.object(measure, "allocations_within", lambda _: None),
    ):
        yield


@contextmanager
def _inner_outputs() -> Iterator[None]:
    """Nobody looks for hooks on an output that other outputs depend on."""
    with patch.object(Run, "look_at", lambda *_: None), patch.object(Run, "note_prehook", lambda *_: None):
        yield


@contextmanager
def _derivatives() -> Iterator[None]:
    """Products are differentiated by the formula for numbers that are not known."""
    with patch.object(watching, "differentiated_as_eager", lambda *_: None):
        yield


UNDONE: dict[str, Plant] = {
    "states": _states,
    "outputs": _outputs,
    "storages": _storages,
    "heads": _heads,
    "arguments": _arguments,
    "own-calls": _own_calls,
    "places": _places,
    "optimizers": _optimizers,
    "marks": _marks,
    "profiles": _profiles,
    "inner-outputs": _inner_outputs,
    "derivatives": _derivatives,
}


def main() -> int:
    """The exit code is 1 if a class was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.hunt.undone", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=sorted(UNDONE), default=list(UNDONE))
    parser.add_argument("--minutes", type=float, default=30.0, help="for each, at most")
    parser.add_argument("--finds", type=int, default=3, help="go on to the next after so many findings")
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="SEED", help="the first seed")
    asked = parser.parse_args()
    logging.getLogger("stowplan").setLevel(logging.ERROR)
    print(f"{'undone':<16}{'cases':>7}{'first':>7}{'seconds':>9}{'found':>7}  verdicts")
    lost = 0
    for name in asked.only:
        row = _hunted(name, asked.first, 60 * asked.minutes, asked.finds)
        print(row.text(name), flush=True)
        lost += not row.seeds
    return int(lost > 0)


class _Row:
    """What became of one class."""

    def __init__(self) -> None:
        self.cases, self.seeds, self.first_seconds = 0, list[int](), 0.0
        self.verdicts = Counter[str]()

    def text(self, name: str) -> str:
        told = ", ".join(f"{count} {verdict}" for verdict, count in self.verdicts.items())
        if not self.seeds:
            return f"{name:<16}{self.cases:>7}{'-':>7}{'-':>9}{0:>7}"
        first = f"{self.seeds[0]:>7}{self.first_seconds:>9.0f}"
        return f"{name:<16}{self.cases:>7}{first}{len(self.seeds):>7}  {told}; seeds {self.seeds}"


def _hunted(name: str, first: int, seconds: float, finds: int) -> _Row:
    row, began = _Row(), time.monotonic()
    with same_everywhere(), UNDONE[name](), Child() as child:
        for seed in itertools.count(first):
            if time.monotonic() - began > seconds or len(row.seeds) >= finds:
                return row
            result = child.judge(seed)
            row.cases += 1
            if result.is_finding:
                row.seeds.append(seed)
                row.verdicts[f"{result.verdict} ({result.message[:60]})"] += 1
                row.first_seconds = row.first_seconds or time.monotonic() - began
    raise AssertionError("the seeds have no end")


if __name__ == "__main__":
    sys.exit(main())
