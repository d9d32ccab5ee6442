"""Max pools of parts as maxima of slices: PyTorch's kernel for the CPU looks at one value after the other.

Forward alone, where each largest value is does not matter. To be differentiated, windows must lie side by
side; a gradient then goes where the kernel would send it, to the first of equals, row by row.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def are_slices_faster(given: Mapping[str, Any]) -> bool:
    """Whether a max pool with these arguments, by name, is better made of slices, in all tiles alike.

    Where it is differentiated, windows that reach out of the image are left to the kernel, as are stand-ins,
    which are there to be captured, with gradients as autograd itself makes them.
    """
    image = given["self"]
    if type(image) is not Tensor or image.device.type != "cpu" or not image.is_floating_point():
        return False
    reaches_out = any(given["padding"]) or given["ceil_mode"]
    return not torch.is_grad_enabled() or (_lie_side_by_side(given) and not reaches_out)


def _lie_side_by_side(given: Mapping[str, Any]) -> bool:
    kernel = list(given["kernel_size"])
    return list(given["stride"] or kernel) == kernel and set(given["dilation"]) == {1}


def max_of_slices(
    image: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """The largest value of each window, one spatial dim after the other."""
    first = image.dim() - len(kernel)
    dims = list(enumerate(zip(kernel, stride, dilation, strict=True), first))
    if torch.is_grad_enabled():
        for dim, (size, _, _) in reversed(dims):
            image = _MaxAlong.apply(image, dim, size)  # type: ignore[no-untyped-call]
        return image
    for dim, (size, step, gap) in dims:
        image = reduce(torch.maximum, _slices(image, dim, range(0, size * gap, gap), step))
    return image


def _slices(image: Tensor, dim: int, places: Sequence[int], step: int) -> list[Tensor]:
    """By place in a window, what all windows have there, which begin every `step`."""
    span = (image.shape[dim] - places[-1] - 1) // step * step + 1
    whole = (slice(None),) * dim
    return [image[*whole, slice(place, place + span, step)] for place in places]


class _MaxAlong(torch.autograd.Function):
    """The largest of each `size` values along one dim."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, dim: int, size: int) -> Tensor:
        ctx.shape, ctx.dim, ctx.size = image.shape, dim, size
        largest, *others = _slices(image, dim, range(size), size)
        is_larger = []
        for other in others:
            is_larger.append(other > largest)
            largest = torch.maximum(largest, other)
        ctx.save_for_backward(*is_larger)
        return largest if others else largest.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, None, None]:
        """By bits: exact whatever comes in, and many times faster than `where`."""
        bits = _BITS[incoming.element_size()]
        covered = ctx.shape[ctx.dim] % ctx.size == 0
        gradient = (incoming.new_empty if covered else incoming.new_zeros)(ctx.shape)
        first, *others = _slices(gradient.view(bits), ctx.dim, range(ctx.size), ctx.size)
        left = incoming.view(bits)
        for other, is_larger in zip(reversed(others), reversed(ctx.saved_tensors), strict=True):
            torch.bitwise_and(left, is_larger.to(bits).neg_(), out=other)
            left = torch.bitwise_xor(left, other, out=first if other is others[0] else None)
        if not others:
            first.copy_(left)
        return gradient, None, None
