"""Losses over tiles: each tile gives a sum and a weight; sums and weights add up, then they are divided."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stowplan.capture import Call
from stowplan.errors import NotTileable
from stowplan.run.parts.part import call_with, filled_in, slotted

aten = torch.ops.aten
_SUM = 2  # ATen's number for reduction="sum"
_BY_CLASS = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_BY_ELEMENT = (
    aten.mse_loss.default,
    aten.l1_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
)
_PLAIN = (aten.mean.default, aten.sum.default)


@dataclass(frozen=True, slots=True)
class TiledLoss:
    """A loss as the quotient of two sums over tiles; `divides` is false for a loss that is itself a sum."""

    call: Call
    arguments: Mapping[str, object]
    divides: bool

    def of(self, operands: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The sum over one tile and its weight."""
        given: dict[str, Any] = {n: filled_in(value, operands) for n, value in self.arguments.items()}
        if self.call.target in _PLAIN:
            return aten.sum.default(operands[0], dtype=given["dtype"]), _count(operands[0])
        summed: Any = call_with(self.call.target, {**given, "reduction": _SUM})
        if self.call.target in _BY_ELEMENT:
            return summed, _count(operands[0])
        total, weight = summed
        return total, weight.detach()

    def summed(self, operands: Sequence[Tensor]) -> Tensor:
        """The sum over one tile."""
        return self.of(operands)[0]

    def weight(self, operands: Sequence[Tensor]) -> Tensor:
        """The weight of one tile by itself, in float64: of nothing but what the loss is taken against."""
        if self.call.target not in _BY_CLASS:
            return _count(operands[0])
        given: dict[str, Any] = {n: filled_in(value, operands) for n, value in self.arguments.items()}
        target, weight = given["target"], given["weight"]
        counted = target != given["ignore_index"]
        each = counted if weight is None else weight.to(torch.float64)[target * counted] * counted
        found: Tensor = each.sum(dtype=torch.float64)
        return found


def tiled_loss(call: Call) -> TiledLoss:
    """How to take this loss over tiles."""
    if call.target not in (*_BY_CLASS, *_BY_ELEMENT, *_PLAIN):
        raise NotTileable(f"{call.target} has no form for a part of what it is taken of")
    bound = call.arguments()
    slots = iter(range(len(bound)))
    arguments = {name: slotted(value, slots) for name, value in bound.items()}
    mean = bound.get("reduction") == 1 or call.target is aten.mean.default
    return TiledLoss(call, arguments, divides=mean)


def _count(tensor: Tensor) -> Tensor:
    return tensor.new_full((), tensor.numel(), dtype=torch.float64)
