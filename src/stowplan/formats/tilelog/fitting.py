"""The log never prints a kernel, stride or padding: they follow from the boxes of a few tiles."""

from collections.abc import Sequence

from stowplan.errors import BadInput, StowplanError
from stowplan.formats.tilelog.log import Announcement, Log
from stowplan.formats.tilelog.network import Layer, network_graph
from stowplan.formats.tilelog.records import BoxRecord
from stowplan.geometry import Rect
from stowplan.ir import Graph, Shape
from stowplan.ops.sliding import Window
from stowplan.ops.windows import windows_of


def fitted_graph(log: Log) -> Graph:
    """The network whose windows give the log's boxes and whose shapes are those it announces."""
    layers, image = [], log.image
    for index, announced in enumerate(log.layers):
        if announced.type not in windows_of:
            raise BadInput(f"no window is known for {announced.type!r}", where=announced.where)
        layers.append(_layer(announced, image, _samples(log, len(log.layers) - index)))
        image = announced.output
    return _agreeing(log, layers)


def _samples(log: Log, position: int) -> list[tuple[Rect, BoxRecord]]:
    """For the op at this position of the forward tables: the region it makes and the record of its input."""
    tables = [table for table in log.forward if len(table) > position]
    return [(table[position - 1].inside, table[position]) for table in tables]


def _layer(announced: Announcement, image: Shape, samples: Sequence[tuple[Rect, BoxRecord]]) -> Layer:
    if not samples:
        raise BadInput("no tile has a record of this layer", where=announced.where)
    rows, columns = (
        _window(samples, dim, image[2 + dim] // max(1, announced.output[2 + dim])) for dim in (0, 1)
    )
    return Layer(
        announced.id,
        announced.type,
        kernel=(rows.kernel, columns.kernel),
        stride=(rows.stride, columns.stride),
        padding=(rows.before, columns.before),
        channels=announced.output[1],
    )


def _window(samples: Sequence[tuple[Rect, BoxRecord]], dim: int, ratio: int) -> Window:
    """Two tiles that start apart give the stride; where all start at one place, the ratio of sizes does."""
    result, record = samples[0]
    apart = next((pair for pair in samples if pair[0].lo[dim] != result.lo[dim]), None)
    stride = max(1, ratio)
    if apart is not None:
        stride = (apart[1].wanted.lo[dim] - record.wanted.lo[dim]) // (apart[0].lo[dim] - result.lo[dim])
    padding = stride * result.lo[dim] - record.wanted.lo[dim]
    kernel = record.wanted.hi[dim] + padding - stride * (result.hi[dim] - 1)
    try:
        return Window(kernel, stride, padding, padding)
    except StowplanError as error:
        raise BadInput(str(error), where=record.where) from None


def _agreeing(log: Log, layers: Sequence[Layer]) -> Graph:
    graph = network_graph(log.image, layers)
    for announced in log.layers:
        shape = graph.tensors[f"{announced.id}.output"].shape
        if shape != announced.output:
            raise BadInput(
                f"the boxes make an output of {shape}, announced is {announced.output}", where=announced.where
            )
    return graph
