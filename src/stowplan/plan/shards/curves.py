"""Curves: ever larger meshes, for the same step (strong scaling) or one that grows with them (weak)."""

from collections.abc import Iterator
from dataclasses import replace

from stowplan.plan.shards.mesh import Axis, Mesh

_FEW = 64  # workers, up to which meshes grow in small steps


def strong_scaling(mesh: Mesh, most: int) -> Iterator[Mesh]:
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
