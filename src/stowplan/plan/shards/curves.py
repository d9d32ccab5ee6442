"""Curves: ever larger meshes, for the same step (strong scaling) or one that grows with them (weak)."""

from collections.abc import Iterator
from dataclasses import replace

from stowplan.plan.shards.mesh import Axis, Mesh


def strong_scaling(mesh: Mesh, most: int) -> Iterator[Mesh]:
    """Meshes of the same axes, each twice as large as the one before, from one worker on."""
    sizes = [1] * len(mesh.axes)
    turn = len(sizes) - 1
    while (grown := _sized(mesh, sizes)).size <= most:
        yield grown
        sizes[turn] *= 2
        turn = (turn - 1) % len(sizes)


def weak_scaling(mesh: Mesh, most: int) -> Iterator[Mesh]:
    """One worker, the mesh without its data axes, and from there on four times as many along the batch."""
    others = Mesh(tuple(axis for axis in mesh.axes if axis.name != "data"))
    if others.size > 1:
        yield Mesh((Axis("data", 1), *_sized(others, [1] * len(others.axes)).axes))
    batches = 1
    while batches * others.size <= most:
        yield Mesh((Axis("data", batches), *others.axes))
        batches *= 4


def _sized(mesh: Mesh, sizes: list[int]) -> Mesh:
    return Mesh(tuple(replace(a, size=n, weights=()) for a, n in zip(mesh.axes, sizes, strict=True)))
