"""Curves: ever larger meshes, for the same step (strong scaling) or one that grows with them (weak).

Steps of a weak curve differ in the batch alone. Those between the smallest and the largest batch follow from
these two, if each of their sizes and strides is either fixed or proportional to the batch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from stowplan.ir import Attribute, Graph, Op, Tensor, bytes_of_shape
from stowplan.techniques.shards.plan.mesh import Axis, MeshAxes

_FEW = 64  # workers, up to which meshes grow in small steps


def strong_scaling(mesh: MeshAxes, most: int) -> Iterator[MeshAxes]:
    """Meshes of the same axes, from one worker to `mesh` and beyond: twice as large each, later four times.

    Axes grow in turn, and beyond their sizes in `mesh` only when all have them.
    """
    wanted = [axis.size for axis in mesh.axes]
    sizes, turns = [1] * len(wanted), list(reversed(range(len(wanted))))
    while (grown := _sized(mesh, sizes)).size <= most:
        yield grown
        for _ in range(1 if grown.size < _FEW else 2):
            below = [axis for axis in turns if 2 * sizes[axis] <= wanted[axis]] or turns
            sizes[below[0]] *= 2
            turns.append(turns.pop(turns.index(below[0])))
            if sizes == wanted:
                break


def weak_scaling(mesh: MeshAxes, most: int) -> Iterator[MeshAxes]:
    """One worker, the mesh without its data axes, and from there on four times as many along the batch."""
    others = MeshAxes(tuple(axis for axis in mesh.axes if axis.name != "data"))
    if others.size > 1:
        yield MeshAxes((Axis("data", 1), *_sized(others, [1] * len(others.axes)).axes))
    batches = 1
    while batches * others.size <= most:
        yield MeshAxes((Axis("data", batches), *others.axes))
        batches *= 4


def _sized(mesh: MeshAxes, sizes: list[int]) -> MeshAxes:
    return MeshAxes(tuple(replace(a, size=n, weights=()) for a, n in zip(mesh.axes, sizes, strict=True)))


def step_between(first: Graph, last: Graph, most: int, times: int) -> Graph | None:
    """The step with `times` the batch of `first`; `last` has `most` times its batch.

    None unless both have the same ops and tensors, and every size that differs is `most` times as large.
    """
    is_same = (first.held, first.name, *first.tensors) == (last.held, last.name, *last.tensors)
    if not is_same or len(first.ops) != len(last.ops):
        return None
    grows = _Growth(most, times)
    pairs = zip(first.tensors.values(), last.tensors.values(), strict=True)
    try:
        tensors = {one.id: grows.tensor(one, other) for one, other in pairs}
        ops = tuple(grows.op(one, other) for one, other in zip(first.ops, last.ops, strict=True))
    except _NotProportionalError:
        return None
    return replace(first, tensors=tensors, ops=ops)


class _NotProportionalError(Exception):
    """Two steps differ in more than sizes that are proportional to the batch."""


class _Growth:
    """From the smallest and the largest step to one with `times` the smallest batch."""

    def __init__(self, most: int, times: int) -> None:
        self._most, self._times = most, times

    def tensor(self, one: Tensor, other: Tensor) -> Tensor:
        if one == other:
            return one
        self._alike(replace(one, shape=other.shape, nbytes=other.nbytes, layout=other.layout), other)
        strides = self._value(_strides(one), _strides(other))
        found = replace(
            one, shape=self._value(one.shape, other.shape), layout="" if strides is None else str(strides)
        )
        for known in (one, other):
            self._alike(_extent_bytes(known), known.nbytes)
        return replace(found, nbytes=_extent_bytes(found))

    def op(self, one: Op, other: Op) -> Op:
        if one == other:
            return one
        self._alike(replace(one, attributes=other.attributes), other)
        return replace(one, attributes=self._value(one.attributes, other.attributes))

    def _alike(self, one: object, other: object) -> None:
        if one != other:
            raise _NotProportionalError

    def _value(self, one: Attribute, other: Attribute) -> Any:
        if type(one) is type(other) and one == other:
            return one
        if type(one) is int and type(other) is int and one * self._most == other:
            return one * self._times
        if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
            return tuple(self._value(*pair) for pair in zip(one, other, strict=True))
        if isinstance(one, Mapping) and isinstance(other, Mapping) and list(one) == list(other):
            return {key: self._value(value, other[key]) for key, value in one.items()}
        raise _NotProportionalError


def _strides(tensor: Tensor) -> tuple[int, ...] | None:
    """The strides of a captured tensor; None if it is contiguous."""
    try:
        return tuple(int(text) for text in tensor.layout.strip("()").split(",") if text) or None
    except ValueError:
        raise _NotProportionalError from None


def _extent_bytes(tensor: Tensor) -> int:
    """Bytes from the first to the last element."""
    shape, strides = tensor.shape, _strides(tensor)
    if shape is None or tensor.dtype is None or len(strides or shape) != len(shape):
        raise _NotProportionalError
    if strides is None or 0 in shape:
        return bytes_of_shape(shape, tensor.dtype)
    elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return elements * tensor.dtype.itemsize
