"""Read a tile log: the network its boxes imply, the tiles, and everything that does not fit the formulas."""

from collections.abc import Iterator, Sequence
from itertools import chain
from math import prod

from stowplan.errors import BadInput
from stowplan.formats.checked import checked
from stowplan.formats.tilelog.fitting import fitted_graph
from stowplan.formats.tilelog.log import Log, parse_log
from stowplan.formats.tilelog.network import stages_of
from stowplan.formats.tilelog.records import BoxRecord
from stowplan.formats.tilelog.schedule import schedule_of
from stowplan.formats.tilelog.streams import separate
from stowplan.formats.tilelog.tables import backward_table, forward_table, steps_of
from stowplan.geometry import Point
from stowplan.ir import Document, Graph, Note, NoteKind, Op, TileSchedule, TileStep

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
