"""Kernel sizes of (de)convolutions, from how many elements input, weight, bias and output have.

A weight of a x b x k x k elements has few factorings into channels and a square kernel; its input and bias,
and the output it has to make, leave one. An input whose shape is unknown too is taken as a square image.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import isqrt, prod
from typing import TypeAlias

from stowplan.errors import BadUse, MissingRule
from stowplan.ir import Shape, Tensor
from stowplan.ops.shapes import output_shapes_of
from stowplan.ops.table import Site

DECONVOLUTION = "Deconvolution2DFunction"
_LARGEST_KERNEL = 64

Layer: TypeAlias = tuple[Shape, Shape, Shape]
"""The shapes of a layer's input, weight and bias."""


def layers_of(site: Site, elements: Callable[[Tensor], int], batch: int | None) -> Iterator[Layer]:
    """Every layer with a square kernel that fits the elements of the op's inputs and output."""
    groups = site.attributes.get("groups", 1)
    if len(site.inputs) < 2 or not isinstance(groups, int) or groups < 1:
        return
    bias = elements(site.inputs[2]) if len(site.inputs) > 2 else None
    weights = elements(site.inputs[1]) * groups
    for kernel in range(1, min(_LARGEST_KERNEL, isqrt(weights)) + 1):
        channels, rest = divmod(weights, kernel * kernel)
        image = None if rest else _image_of(site.inputs[0], channels, bias, elements, batch)
        layer = None if image is None else _layer(site, image, channels, groups, kernel)
        if layer and bias in (None, *layer[2]) and _makes(site, layer) == elements(site.outputs[0]):
            yield layer


def _image_of(
    tensor: Tensor, channels: int, bias: int | None, elements: Callable[[Tensor], int], batch: int | None
) -> Shape | None:
    """The input's shape: as known, or the square image with `channels` / `bias` channels."""
    if tensor.shape is not None:
        return tensor.shape if len(tensor.shape) == 4 and tensor.shape[1] else None
    if not batch or not bias or channels % bias:
        return None
    pixels, rest = divmod(elements(tensor), batch * (channels // bias))
    side = isqrt(pixels)
    return (batch, channels // bias, side, side) if not rest and side * side == pixels else None


def _layer(site: Site, image: Shape, channels: int, groups: int, kernel: int) -> Layer | None:
    """The layer with this kernel, where `channels` is its input channels times its output channels."""
    outputs, rest = divmod(channels, image[1])
    first, second = (image[1], outputs) if site.op.type == DECONVOLUTION else (outputs, image[1])
    if rest or second % groups:
        return None
    return image, (first, second // groups, kernel, kernel), (outputs,)


def _makes(site: Site, layer: Layer) -> int | None:
    """How many elements the output of this layer would have."""
    inputs = tuple(replace(tensor, shape=shape) for tensor, shape in zip(site.inputs, layer, strict=False))
    try:
        return prod(output_shapes_of(replace(site, inputs=inputs))[0])
    except (MissingRule, BadUse):
        return None
