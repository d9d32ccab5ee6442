"""A log of a fused, tiled forward and backward: the network, and the region each tile reads at each op."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from math import prod

from stowplan.errors import BadInput, BadUse
from stowplan.formats.checked import checked
from stowplan.formats.tilelog.log import Log, fitted_graph, parse_log
from stowplan.formats.tilelog.network import (
    Layer,
    Stage,
    network_graph,
    schedule_of,
    stages_of,
    tile_schedule,
)
from stowplan.formats.tilelog.records import (
    BoxRecord,
    backward_table,
    forward_table,
    separate,
    steps_of,
    text_of,
)
from stowplan.geometry import Point
from stowplan.ir import Document, Graph, Note, NoteKind, Op, Shape, TileSchedule, TileStep
from stowplan.ops.table import shape_of

__all__ = ["FORMAT", "Layer", "network_graph", "read", "recognise", "tile_schedule", "write"]


FORMAT = "tilelog"


def recognise(text: str) -> bool:
    """A log that opens with the layers of a network."""
    head = text[:1024]
    return "Input " in head and "L-->R current op " in head


def read(text: str) -> Document:
    """The network, its tiles, and how the tiled gradient compared with the untiled one."""
    lines, calls = separate(text)
    log = parse_log(lines)
    places = {layer.id: layer.where for layer in log.layers}
    graph = checked(fitted_graph(log), places, otherwise=log.layers[0].where)
    tiles = _tiles(log, graph)
    counts = {"lines": len(lines) - (lines[-1].text == ""), "engine_calls": len(calls), **dict(_counts(log))}
    notes = (*_inferred(log, graph), *_odd(log, graph, tiles))
    return Document(FORMAT, graph, tiles=tiles, notes=notes, counts=counts)


def _tiles(log: Log, graph: Graph) -> TileSchedule:
    forward = _steps_by_tile(log.forward, graph.ops[::-1], prefix="")
    backward = _steps_by_tile(log.backward, graph.ops, prefix="bk-")
    grid = tuple(max(numbers) + 1 for numbers in zip(*forward, strict=True))
    if prod(grid) != len(forward) or forward.keys() != backward.keys():
        what = f"{len(forward)} f_info and {len(backward)} b_info tables do not fill a grid of {grid}"
        raise BadInput(what, where=log.forward[0][0].where)
    ran = dict.fromkeys(record.coord for record in log.repeated if record.coord in backward)
    return TileSchedule(grid, forward, {coord: backward[coord] for coord in ran | dict.fromkeys(backward)})


def _steps_by_tile(
    tables: Sequence[Sequence[BoxRecord]], ops: Sequence[Op], prefix: str
) -> dict[Point, tuple[TileStep, ...]]:
    by_tile: dict[Point, tuple[TileStep, ...]] = {}
    for table in tables:
        coord = table[0].coord
        if coord in by_tile or any(record.coord != coord for record in table):
            raise BadInput(f"tile {coord} has two tables, or two tiles one", where=table[0].where)
        by_tile[coord] = tuple(steps_of(table, ops, prefix))
    return by_tile


def _counts(log: Log) -> Iterator[tuple[str, int]]:
    yield "separators", log.separators
    yield "tiles", len(log.forward)
    yield "f_info_records", sum(map(len, log.forward))
    yield "b_info_records", sum(map(len, log.backward))
    yield "reference_backward_ops", log.reference_ops
    yield "repeated_records", len(log.repeated)
    if log.verdict is not None:
        yield "differing_elements", log.verdict[0]
        yield "compared_elements", log.verdict[1]


def _inferred(log: Log, graph: Graph) -> Iterator[Note]:
    yield Note(NoteKind.INFERRED, log.layers[0].where, "elements are float32: the log prints no other type")
    for layer, op in zip(log.layers, graph.ops, strict=True):
        kernel, stride, padding = (op.attributes[key] for key in ("kernel_size", "stride", "padding"))
        what = f"{op.type} has kernel {kernel}, stride {stride}, padding {padding}, by the tiles' boxes"
        yield Note(NoteKind.INFERRED, layer.where, what)


def _odd(log: Log, graph: Graph, tiles: TileSchedule) -> Iterator[Note]:
    """Records that the windows do not give, where first planned or when repeated, and a missing verdict."""
    expected = _expected_records(graph, tiles)
    for record in chain(*log.forward, *log.backward, log.repeated):
        if record != expected.get((record.coord, record.name)):
            what = f"{record.name} of tile {record.coord} is not what the network's windows give"
            yield Note(NoteKind.ODD, record.where, what)
    if log.verdict is None:
        yield Note(NoteKind.ODD, log.backward[-1][0].where, "no comparison of gradients follows the tiles")


def _expected_records(graph: Graph, tiles: TileSchedule) -> dict[tuple[Point, str], BoxRecord]:
    owned = {coord: steps[0].result for coord, steps in tiles.backward.items()}
    exact, stages = schedule_of(graph, tiles.grid, owned), stages_of(graph)
    records = (
        record
        for coord in owned
        for record in chain(
            forward_table(stages, tiles.grid, coord, exact.forward[coord]),
            backward_table(stages, coord, exact.backward[coord]),
        )
    )
    return {(record.coord, record.name): record for record in records}


_RULE = "-" * 30


def write(document: Document) -> str:
    """The document's network and tiles as `read` reads them."""
    graph = document.graph
    if document.tiles is None or not graph.ops:
        raise BadUse("a tile log needs ops and a tile schedule, and this document has none")
    if not all(op.id.isdecimal() and op.id.isascii() for op in graph.ops):
        raise BadUse("a tile log names ops by numbers; this graph does not")
    stages = stages_of(graph)
    return "".join((*_network(graph), *_tile_tables(stages, document.tiles), *_verdict(document)))


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


def _tile_tables(stages: tuple[Stage, ...], tiles: TileSchedule) -> Iterator[str]:
    for coord in tiles.forward:
        yield f"coord {list(coord)}\n{box_tables(stages, tiles, coord)}"


def _verdict(document: Document) -> Iterator[str]:
    counts = document.counts
    if "compared_elements" in counts:
        differing, compared = counts["differing_elements"], counts["compared_elements"]
        yield f" precentile {differing} / {compared} = {differing / max(1, compared)}\n"
