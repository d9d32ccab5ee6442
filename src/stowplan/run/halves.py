"""Halves: generated source as two functions, ready to be called."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import Tensor

from stowplan.run.source import Source
from stowplan.run.tiers.live import LiveTier

Forward: TypeAlias = Callable[[Sequence[Tensor]], tuple[tuple[Tensor, ...], list[Tensor]]]
Backward: TypeAlias = Callable[[Sequence[Tensor], list[Tensor], list[Tensor]], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Halves:
    """The functions that `source` defines."""

    source: Source
    forward: Forward
    backward: Backward


def compiled(source: Source, tier: LiveTier | None = None) -> Halves:
    """Run the text that defines the two functions. It is generated here, from ops of PyTorch and a tier."""
    scope: dict[str, object] = {"torch": torch, "ops": torch.ops, "aten": torch.ops.aten, "tier": tier}
    code = compile(source.text, "<stowplan>", "exec")
    exec(code, scope)  # noqa: S102 -- the text is stowplan's own, made from op names, literals and checked identifiers
    forward, backward = cast(Forward, scope["forward"]), cast(Backward, scope["backward"])
    return Halves(source, _below_autograd(forward), backward)


def _below_autograd(forward: Forward) -> Forward:
    """As kernels run in eager: some ask whether gradients are enabled, but none records anything."""

    def run(primals: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
            return forward(primals)

    return run
