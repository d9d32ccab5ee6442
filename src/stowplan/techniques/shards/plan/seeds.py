"""Seeds: which dim of each input a mesh axis cuts, by the axis's name: data, space, sequence.

An axis named model cuts weights, and no input.

Images are [sample, channel, place..], maps of labels [sample, place..], tokens [sample, position, ..].
"""

from collections.abc import Mapping
from dataclasses import replace

from stowplan.errors import BadUse
from stowplan.ir import Graph, Kind, Phase, Shape
from stowplan.ops.table import shape_of
from stowplan.techniques.shards.plan.mesh import MeshAxes
from stowplan.techniques.shards.plan.weights import MODEL

NAMES = ("data", "space", "sequence")
"""Axes that cut inputs."""


def seeds_for(graph: Graph, mesh: MeshAxes) -> Mapping[str, tuple[int | None, ...]]:
    """By input, the dim that each axis cuts; None where it has no such dim."""
    if unknown := [axis.name for axis in mesh.axes if axis.name not in (*NAMES, MODEL)]:
        raise BadUse(
            f"mesh axis {unknown[0]!r} does not say what it cuts;"
            f" name it {', '.join((*NAMES, MODEL))}, or give dims"
        )
    inputs = {n: shape_of(t) for n, t in graph.tensors.items() if t.kind is Kind.INPUT}
    places = max((len(shape) - 2 for shape in inputs.values()), default=0)
    seeds = {name: _cut(shape, mesh, places) for name, shape in inputs.items()}
    for number, axis in enumerate(mesh.axes):
        if axis.name != MODEL and all(cut[number] is None for cut in seeds.values()):
            shapes = ", ".join(f"{name} of {'x'.join(map(str, shape))}" for name, shape in inputs.items())
            among = f"in {shapes}" if inputs else "because the step has no inputs"
            raise BadUse(f"mesh axis {axis.name!r} (number {number + 1}) finds no dim to cut {among}")
    return seeds


def step_of_document(graph: Graph) -> Graph:
    """The step of a graph from a file: what its `data` ops make are inputs, which are divided.

    Ops of forward that make no tensor, as those that print an accuracy, are left out.
    """
    given = {name for op in graph.ops if op.type == "data" for name in op.writes()}
    tensors = {n: replace(t, kind=Kind.INPUT) if n in given else t for n, t in graph.tensors.items()}
    ops = (op for op in graph.ops if op.type != "data" and (op.outputs or op.phase is not Phase.FORWARD))
    return replace(graph, tensors=tensors, ops=tuple(ops))


def _cut(shape: Shape, mesh: MeshAxes, places: int) -> tuple[int | None, ...]:
    """`places` is how many dims of space the image has: labels have them last, or one label is for all."""
    found: list[int | None] = []
    space = len(shape) - places
    for axis in mesh.axes:
        if axis.name == "space":
            found.append(space if 1 <= space < len(shape) and shape[space] > 1 else None)
            space += 1
        elif axis.name == MODEL:
            found.append(None)
        else:
            dim = NAMES.index(axis.name) // 2  # data cuts the first dim, a sequence the second
            found.append(dim if dim < len(shape) else None)
    return tuple(found)
