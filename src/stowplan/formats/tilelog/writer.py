"""Write a tile schedule in the log's own text: the network's layers, then each tile's two tables."""

from collections.abc import Iterable, Iterator

from stowplan.errors import BadUse
from stowplan.formats.tilelog.network import Stage, stages_of
from stowplan.formats.tilelog.records import BoxRecord, text_of
from stowplan.formats.tilelog.tables import backward_table, forward_table
from stowplan.geometry import Point
from stowplan.ir import Document, Graph, Shape, TileSchedule
from stowplan.ops.table import shape_of

_RULE = "-" * 30


def write(document: Document) -> str:
    """The document's network and tiles as `read` reads them."""
    graph = document.graph
    if document.tiles is None or not graph.ops:
        raise BadUse("a tile log needs ops and a tile schedule, and this document has none")
    if not all(op.id.isdecimal() and op.id.isascii() for op in graph.ops):
        raise BadUse("a tile log names ops by numbers; this graph does not")
    stages = stages_of(graph)
    return "".join((*_network(graph), *_tiles(stages, document.tiles), *_verdict(document)))


def box_tables(stages: tuple[Stage, ...], tiles: TileSchedule, coord: Point) -> str:
    """The f_info and b_info tables of one tile."""
    forward = forward_table(stages, tiles.grid, coord, tiles.forward[coord])
    backward = backward_table(stages, coord, tiles.backward[coord])
    return f"{_RULE}\nf_info {_table(forward)}{_RULE}\nb_info {_table(backward)}"


def _table(records: Iterable[BoxRecord]) -> str:
    return "{" + ", ".join(f"{record.key}: {text_of(record)}" for record in records) + "}\n"


def _network(graph: Graph) -> Iterator[str]:
    yield f"Input {_shape(shape_of(graph.tensors[graph.ops[0].inputs[0].tensor]))}\n"
    for op in graph.ops:
        output = graph.tensors[op.outputs[0].tensor]
        yield f"L-->R current op {op.id}\nafter {op.type} {_shape(shape_of(output))}\n"


def _shape(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _tiles(stages: tuple[Stage, ...], tiles: TileSchedule) -> Iterator[str]:
    for coord in tiles.forward:
        yield f"coord {list(coord)}\n{box_tables(stages, tiles, coord)}"


def _verdict(document: Document) -> Iterator[str]:
    counts = document.counts
    if "compared_elements" in counts:
        differing, compared = counts["differing_elements"], counts["compared_elements"]
        yield f" precentile {differing} / {compared} = {differing / max(1, compared)}\n"
