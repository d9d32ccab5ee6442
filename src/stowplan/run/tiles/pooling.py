"""Max pools of parts that nobody differentiates, as maxima of slices: on a CPU a tenth of the kernel's time.

The kernel also finds where each largest value is, one value after the other; only backward asks for that.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor


def are_slices_faster(given: Mapping[str, Any]) -> bool:
    """Whether a max pool with these arguments, by name, is better made of slices, in all tiles alike.

    Padding would be a copy, which tiles at the border alone would have.
    """
    reaches_out = any(given["padding"]) or given["ceil_mode"]
    return given["self"].device.type == "cpu" and not reaches_out and not torch.is_grad_enabled()


def max_of_slices(
    image: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """The largest value of each window, one spatial dim after the other."""
    first = image.dim() - len(kernel)
    for dim, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True), first):
        image = _max_along(image, dim, [place * gap for place in range(size)], step)
    return image


def _max_along(image: Tensor, dim: int, places: Sequence[int], step: int) -> Tensor:
    """Of windows that begin every `step` and look at these places from there."""
    windows = (image.shape[dim] - places[-1] - 1) // step + 1
    whole = (slice(None),) * dim
    slices = (image[*whole, slice(at, at + (windows - 1) * step + 1, step)] for at in places)
    return reduce(torch.maximum, slices)
