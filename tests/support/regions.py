"""What outputs really need of inputs: found by disturbing elements, and by rules through a whole graph."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stowplan.geometry import Rect
from stowplan.ir import Graph, Phase
from stowplan.ops.regions import regions_of
from stowplan.ops.table import site_of
from tests.support.op_samples import Sample

Needed = NDArray[np.bool_]
"""By output index, then input index: whether that output changes with that input."""


def dependence(sample: Sample, output: int) -> list[Needed]:
    """For each input, what elements of output number `output` need of it."""
    before = sample.outputs()[output]
    found = []
    for position, tensor in enumerate(sample.tensors):
        needed = np.zeros((*before.shape, *tensor.shape), dtype=bool)
        for index in np.ndindex(*tensor.shape):
            for value in _disturbances(sample, tensor, index):
                after = sample.outputs(_replaced(sample.tensors, position, index, value))[output]
                needed[(..., *index)] |= _differs(before, after)
        found.append(needed)
    return found


def needed_rect(needed: Needed, outputs: Rect) -> Rect:
    """The smallest rect of the input that holds everything the rect of outputs needs."""
    part = needed[tuple(slice(low, high) for low, high in zip(outputs.lo, outputs.hi, strict=True))]
    ndim = needed.ndim - outputs.ndim
    places = np.argwhere(part.reshape(-1, *needed.shape[outputs.ndim :]).any(axis=0))
    if not len(places):
        return Rect((0,) * ndim, (0,) * ndim)
    return Rect(tuple(map(int, places.min(axis=0))), tuple(map(int, places.max(axis=0) + 1)))


def _disturbances(sample: Sample, tensor: Tensor, index: tuple[int, ...]) -> Iterator[float]:
    """Other values for one element: another truth, other indices, the sample's own choice of numbers."""
    if tensor.dtype is torch.bool:
        yield not tensor[index]
    elif not tensor.is_floating_point():
        yield from {int(value) for value in tensor.flatten()} - {int(tensor[index])}
    else:
        yield from sample.disturbances


def _replaced(
    tensors: Sequence[Tensor], position: int, index: tuple[int, ...], value: float
) -> tuple[Tensor, ...]:
    changed = tensors[position].clone()
    changed[index] = value
    return (*tensors[:position], changed, *tensors[position + 1 :])


def _differs(before: Tensor, after: Tensor) -> Needed:
    same = (before == after) | (before.isnan() & after.isnan())
    return np.asarray(~same.numpy())


def pulled(graph: Graph, tensor: str, rect: Rect) -> dict[str, Rect]:
    """What a rect of `tensor` needs of every tensor before it; a fork takes the hull of its readers."""
    needed = {tensor: rect}
    for op in reversed([op for op in graph.ops if op.phase is Phase.FORWARD]):
        site = site_of(graph, op)
        for use, relation in zip(op.outputs, regions_of(site).outputs, strict=True):
            if use.tensor not in needed:
                continue
            for source, part in zip(site.inputs, relation.pull(needed[use.tensor]), strict=True):
                if part is not None:
                    needed[source.id] = part.hull(needed.get(source.id, part))
    return needed
