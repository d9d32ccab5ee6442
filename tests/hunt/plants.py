"""Planted faults: one of each kind of defect, put into stowplan to see that the hunter finds it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from re import sub
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor, nn

from stowplan.plan.draft import Draft
from stowplan.plan.planner import Planner
from stowplan.run import fitting
from stowplan.run.border.guard import Guard
from stowplan.run.planning.planner import draft_within
from stowplan.run.step import straight
from stowplan.run.step.function import Halves, compiled
from stowplan.run.step.source import Source

Plant: TypeAlias = Callable[[], AbstractContextManager[None]]


class _Skewed(torch.autograd.Function):
    """The identity, with a gradient that is a little too large."""

    @staticmethod
    def forward(_context: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(_context: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * (1 + 2**-20)


_skewed: Callable[[Tensor], Tensor] = _Skewed.apply


@contextmanager
def _wrong_gradient() -> Iterator[None]:
    """All gradients of a planned step are too large by a millionth."""
    planned = straight.StraightStep.__call__

    def call(self: straight.StraightStep, *args: object, **kwargs: object) -> object:
        output = planned(self, *args, **kwargs)
        return _skewed(output) if isinstance(output, Tensor) and output.requires_grad else output

    with patch.object(straight.StraightStep, "__call__", call):
        yield


@contextmanager
def _buffer_updated_twice() -> Iterator[None]:
    """A planned step counts its batches twice."""
    planned = fitting.FittedModule.forward

    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        output = planned(self, *args, **kwargs)  # type: ignore[arg-type]
        for module in self.modules():
            if (
                isinstance(module, nn.BatchNorm2d)
                and module.training
                and module.num_batches_tracked is not None
            ):
                module.num_batches_tracked.add_(1)
        return output

    with patch.object(fitting.FittedModule, "forward", forward):
        yield


@contextmanager
def _redrawn_number() -> Iterator[None]:
    """A random op that is recomputed draws new numbers."""

    def changed(source: Source, *more: Any, **named: Any) -> Halves:
        text = sub(r"(try:\n *)torch.default_generator.set_state", r"\1id", source.text)
        return compiled(replace(source, text=text), *more, **named)

    with patch.object(straight, "compiled", changed):
        yield


@contextmanager
def _budget_exceeded() -> Iterator[None]:
    """Plans are made for more than is allowed."""

    def larger(planner: Planner, allowed_bytes: int) -> Draft:
        draft_within(planner, allowed_bytes)  # what is refused stays refused
        return draft_within(planner, allowed_bytes + allowed_bytes // 4)

    with patch("stowplan.run.planning.planner.draft_within", larger):
        yield


@contextmanager
def _stale_attribute() -> Iterator[None]:
    """A plan made for other attributes is taken for the same."""
    with patch.object(Guard, "is_untouched", lambda guard, _: guard.is_set):
        yield


@contextmanager
def _untyped_error() -> Iterator[None]:
    """A step with a softmax is not bound, by an error of Python's own."""
    bound = straight.StraightStep.__init__

    def init(self: straight.StraightStep, captured: Any, *args: Any, **kwargs: Any) -> None:
        if any("softmax" in op.type for op in captured.graph.ops):
            raise KeyError("softmax")
        bound(self, captured, *args, **kwargs)

    with patch.object(straight.StraightStep, "__init__", init):
        yield


PLANTS: dict[str, Plant] = {
    "wrong-gradient": _wrong_gradient,
    "buffer-updated-twice": _buffer_updated_twice,
    "redrawn-number": _redrawn_number,
    "budget-exceeded": _budget_exceeded,
    "stale-attribute": _stale_attribute,
    "untyped-error": _untyped_error,
}
