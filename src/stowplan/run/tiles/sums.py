"""Sums: gradients of what tiles read, added up as soon as autograd has them, in float32 or wider."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from stowplan.run.parts.part import Index
from stowplan.run.tiles.local import LocalStep
from stowplan.torch_private import autograd_in_kernels


class Sums:
    """A segment's inputs as autograd leaves of one tile after another, and the sums of their gradients."""

    def __init__(
        self,
        given: Mapping[str, Tensor],
        wanted: Mapping[str, Tensor],
        places: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Gradients are `wanted` of what looks like this, with contents or without.

        `places` are for sums that tiles clear part by part, each before anything is added to it.
        """
        self._given, self._wanted = given, wanted
        device = next(iter(given.values())).device
        own = (name for name in wanted if name not in (places or {}))
        self._sums = {**(places or {}), **{name: _zeros_like(wanted[name], device) for name in own}}

    def clear(self, name: str, index: Index) -> None:
        """Begin a part of a sum."""
        self._sums[name][index].zero_()

    def leaves(self, tile: LocalStep) -> dict[str, Tensor]:
        """The parts that a tile reads. The gradient of a part is added to its sum and freed."""
        made = tile.made_before(self._given)
        return {
            name: self._leaf(name, index, made.pop(name) if name in made else self._given[name][index])
            for name, index in tile.reads.items()
        }

    def _leaf(self, name: str, index: Index, part_read: Tensor) -> Tensor:
        leaf = part_read.detach()
        if name not in self._sums:
            return leaf
        leaf.requires_grad_()
        part = self._sums[name][index]

        def add(arrived: Tensor) -> None:
            part.add_(arrived.grad)  # type: ignore[arg-type]  # there is one when the hook is called
            arrived.grad = None

        leaf.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
        return leaf

    def add(self, name: str, gradient: Tensor) -> None:
        """Add to a sum, if it is wanted."""
        if name in self._sums:
            self._sums[name].add_(gradient)

    def of(self, names: Iterable[str]) -> list[Tensor]:
        """The sums so far."""
        return [self._sums[name] for name in names]

    def totals(self, names: Iterable[str], scale: float = 1.0) -> list[Tensor]:
        """The sums, in the dtype of what they are the gradients of."""
        wanted = {name: self._sums[name] for name in names}
        for total in wanted.values():
            if scale != 1.0:
                total.mul_(scale)
        return [total.to(self._wanted[name].dtype) for name, total in wanted.items()]


def differentiate(ends: dict[str, Tensor], incoming: Sequence[Tensor]) -> None:
    """Run autograd from the ends, which it alone holds from then on."""
    pairs = [(end, grad) for end, grad in zip(ends.values(), incoming, strict=True) if end.requires_grad]
    ends.clear()
    if pairs:
        torch.autograd.backward([end for end, _ in pairs], [grad for _, grad in pairs])


@contextmanager
def differentiating() -> Iterator[None]:
    """Autograd on, also inside the kernel of a custom op, where PyTorch has switched it off."""
    with autograd_in_kernels(), torch.enable_grad():
        yield


def _zeros_like(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32), device=device)
