"""Buffer reuse: which outputs of a segment may overwrite inputs, and which gradients may overwrite gradients.

If each tile reads exactly the part of an input that it writes of an output, as on the skip of a residual
block, no other tile reads that part. The output can then take the input's memory, and in backward the input's
gradient can take the memory of the output's gradient.
"""

from collections.abc import Iterator, Mapping, Sequence

from stowplan.geometry import Rect
from stowplan.ir import DType, Graph
from stowplan.ops.table import shape_of
from stowplan.techniques.tiles.plan.rects import TileLevels
from stowplan.techniques.tiles.plan.rounds import Round

_SUMMED_AS_THEY_ARE = (DType.FLOAT32, DType.FLOAT64)  # gradients of narrower ones are added up in float32


def buffers_reused(last: Round) -> Mapping[str, str]:
    """By input, the output that may overwrite it; in backward its gradient may overwrite the output's
    gradient.

    `last` is the pass that computes the outputs. Other passes are differentiated after it, and only add.
    """
    if last.segment.loss is not None:
        return {}
    return dict(_pairs(last))


def _pairs(last: Round) -> Iterator[tuple[str, str]]:
    left = list(last.segment.outputs)
    for name in last.segment.inputs:
        output = next((each for each in left if _may_overwrite(last, name, each)), None)
        if output is not None:
            left.remove(output)
            yield name, output


def _may_overwrite(last: Round, name: str, output: str) -> bool:
    return _look_alike(last.segment.graph, name, output) and _is_read_where_written(last, name, output)


def _look_alike(graph: Graph, name: str, output: str) -> bool:
    one, other = graph.tensors[name], graph.tensors[output]
    return one.dtype in _SUMMED_AS_THEY_ARE and (one.shape, one.dtype) == (other.shape, other.dtype)


def _is_read_where_written(last: Round, name: str, output: str) -> bool:
    written = [tile.owned.get(output) for tile in last.tiles]
    return _read(last.tiles, name) == written and _covers(written, shape_of(last.segment.graph.tensors[name]))


def _read(tiles: Sequence[TileLevels], name: str) -> list[Rect | None]:
    return [tile.held.get(name) for tile in tiles]


def _covers(parts: Sequence[Rect | None], shape: tuple[int, ...]) -> bool:
    """Whether parts of a grid are all of a tensor, each place once."""
    return sum(part.volume for part in parts if part) == Rect.of_shape(shape).volume
