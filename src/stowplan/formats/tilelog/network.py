"""The tiled network, a chain of convolutions and pools, as a graph; and the regions that each tile needs.

Backward starts at the disjoint part of the input that a tile owns, and follows its gradient op by op to the
output. Forward starts at the output region where backward ended, and computes from the last op to the first
the region each op reads.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from stowplan.geometry import Point, Rect
from stowplan.ir import (
    DType,
    Graph,
    Kind,
    Op,
    Phase,
    Shape,
    Tensor,
    TileSchedule,
    TileStep,
    Use,
    bytes_of_shape,
)
from stowplan.ops.shapes import output_shapes_of
from stowplan.ops.table import Site, shape_of, site_of
from stowplan.ops.windows import Window, pull, reach, windows_of

Pair: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Layer:
    """One conv2d or maxpool2d; sizes are (H, W). A pool keeps its input's channels and ignores `channels`."""

    id: str
    type: str
    kernel: Pair
    stride: Pair
    padding: Pair
    channels: int = 1

    @property
    def has_weight(self) -> bool:
        return self.type == "conv2d"


def network_graph(image: Shape, layers: Sequence[Layer]) -> Graph:
    """The forward graph of the chain on an image [n, channels, h, w] of float32."""
    previous = _tensor("input", Kind.INPUT, image)
    tensors, ops = [previous], []
    for layer in layers:
        inputs = (previous, *_weights(layer, shape_of(previous)))
        op = _op(layer, inputs)
        (shape,) = output_shapes_of(Site(op, inputs, ()))
        previous = _tensor(f"{layer.id}.output", Kind.ACTIVATION, shape)
        tensors += [*inputs[1:], previous]
        ops.append(op)
    return Graph({tensor.id: tensor for tensor in tensors}, tuple(ops), held=frozenset({previous.id}))


def _tensor(name: str, kind: Kind, shape: Shape) -> Tensor:
    return Tensor(name, kind, shape, DType.FLOAT32, bytes_of_shape(shape, DType.FLOAT32))


def _weights(layer: Layer, image: Shape) -> Iterator[Tensor]:
    if layer.has_weight:
        yield _tensor(f"{layer.id}.weight", Kind.PARAMETER, (layer.channels, image[1], *layer.kernel))


def _op(layer: Layer, inputs: Sequence[Tensor]) -> Op:
    return Op(
        layer.id,
        layer.type,
        Phase.FORWARD,
        inputs=tuple(Use(tensor.id) for tensor in inputs),
        outputs=(Use(f"{layer.id}.output"),),
        attributes={
            "kernel_size": layer.kernel,
            "stride": layer.stride,
            "padding": layer.padding,
            "dilation": (1, 1),
        },
    )


@dataclass(frozen=True, slots=True)
class Stage:
    """An op of the chain with what tiles need to know of it: its windows and the sizes (H, W) around it."""

    op: Op
    windows: tuple[Window, ...]
    inputs: Shape
    outputs: Shape


def stages_of(graph: Graph) -> tuple[Stage, ...]:
    """The chain's ops, first to last."""
    sites = (site_of(graph, op) for op in graph.ops)
    return tuple(
        Stage(site.op, windows_of(site), shape_of(site.inputs[0])[2:], shape_of(site.outputs[0])[2:])
        for site in sites
    )


def tile_schedule(graph: Graph, grid: Point) -> TileSchedule:
    """The steps of every tile when the chain's input is cut evenly into a grid of (rows, columns)."""
    owned = Rect.of_shape(stages_of(graph)[0].inputs).split(grid)
    coords = product(*map(range, grid))
    return schedule_of(graph, grid, dict(zip(coords, owned, strict=True)))


def schedule_of(graph: Graph, grid: Point, owned: Mapping[Point, Rect]) -> TileSchedule:
    """The steps of every tile, given the part of the input it owns. Backward runs in reverse tile order."""
    stages = stages_of(graph)
    backward = {coord: tuple(_backward(stages, rect)) for coord, rect in owned.items()}
    forward = {coord: tuple(_forward(stages, steps[-1].inside)) for coord, steps in backward.items()}
    return TileSchedule(grid, forward, dict(reversed(backward.items())))


def _backward(stages: Sequence[Stage], rect: Rect) -> Iterator[TileStep]:
    for stage in stages:
        wanted = reach(stage.windows, rect)
        inside = wanted.clip(stage.outputs)
        yield TileStep(stage.op.id, rect, wanted, inside)
        rect = inside


def _forward(stages: Sequence[Stage], rect: Rect) -> Iterator[TileStep]:
    for stage in reversed(stages):
        wanted = pull(stage.windows, rect)
        inside = wanted.clip(stage.inputs)
        yield TileStep(stage.op.id, rect, wanted, inside)
        rect = inside
