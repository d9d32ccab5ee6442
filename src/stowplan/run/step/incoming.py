"""Incoming gradients: laid out as the plan can take them, or else copied into the layout that was captured.

A plan takes a layout other than the captured one as it is, with eager's bits, if the captured calls run on it
and no op then writes over an operand that is laid out otherwise than eager's result. What is copied gives the
gradients of eager for the copy, which are those for the original within rounding.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from stowplan.capture import Captured
from stowplan.capture.layouts import swayed_ops
from stowplan.capture.storage_views import same_strides, stride_of
from stowplan.plan.decision import Compute, RecomputeOp, Step

_log = logging.getLogger("stowplan")
_Strides = tuple[tuple[int, ...], ...]


class IncomingGradients:
    """Of one step: `suited` makes gradients that come in ready for its backward half."""

    def __init__(self, captured: Captured, steps: Sequence[Step]) -> None:
        self._captured = captured
        self._names = [name for name in captured.program.tangents if name is not None]
        tensors = (captured.graph.tensors[name] for name in self._names)
        self._expected: _Strides = tuple(map(stride_of, tensors))
        runs = (step for step in steps if isinstance(step, (Compute, RecomputeOp)))
        self._overwriting = frozenset(step.op for step in runs if step.overwrites)
        self._taken: dict[_Strides, bool] = {}

    def suited(self, gradients: list[Tensor]) -> list[Tensor]:
        """The gradients in the order of the step's tangents; the list is emptied of what is copied."""
        strides = tuple(gradient.stride() for gradient in gradients)
        if strides == self._expected or self._takes(strides):
            return gradients
        for number, expected in enumerate(self._expected):
            gradients[number] = _laid_out(gradients[number], expected)
        return gradients

    def _takes(self, strides: _Strides) -> bool:
        if strides not in self._taken:
            captured, given = self._captured, dict(zip(self._names, strides, strict=True))
            swayed = swayed_ops(captured.graph, captured.program, given)
            self._taken[strides] = swayed is not None and self._overwriting.isdisjoint(swayed)
            if not self._taken[strides]:
                _log.warning(
                    "gradients come in with strides %s, and the step was captured for %s: they are copied,"
                    " and the gradients of parameters are those of eager within rounding",
                    *(", ".join(map(str, each)) for each in (strides, self._expected)),
                )
        return self._taken[strides]


def _laid_out(gradient: Tensor, stride: tuple[int, ...]) -> Tensor:
    if same_strides(tuple(gradient.shape), gradient.stride(), stride):
        return gradient
    copy = torch.empty_strided(gradient.shape, stride, dtype=gradient.dtype, device=gradient.device)
    return copy.copy_(gradient)
