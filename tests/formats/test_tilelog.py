"""The tile log: two streams taken apart, a network and its tiles, and every box from the network alone."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from stowplan.analyse import facts_of
from stowplan.errors import BadInput, BadUse
from stowplan.formats import tilelog
from stowplan.formats.tilelog import Layer, box_tables, network_graph, tile_schedule
from stowplan.formats.tilelog.network import stages_of
from stowplan.formats.tilelog.records import BoxRecord, parse_record, separate
from stowplan.geometry import Rect, are_disjoint, covers
from stowplan.ir import Document, Kind, NoteKind
from stowplan.ops.effects import macs_of
from stowplan.ops.table import site_of

LAYERS = (
    Layer("139784840008080", "conv2d", (3, 3), (1, 1), (1, 1)),
    Layer("139784840008224", "maxpool2d", (2, 2), (2, 2), (0, 0)),
    Layer("139783032421920", "conv2d", (3, 3), (1, 1), (1, 1)),
    Layer("139784839957760", "maxpool2d", (2, 2), (2, 2), (0, 0)),
)
GRID = (4, 4)


@pytest.fixture(scope="module")
def text(dump: Callable[[str], Path]) -> str:
    return dump("tilelog").read_text()


@pytest.fixture(scope="module")
def document(text: str) -> Document:
    assert tilelog.recognise(text)
    return tilelog.read(text)


def test_counts(document: Document) -> None:
    assert document.counts == {
        "lines": 5127,
        "engine_calls": 118,
        "separators": 4,
        "tiles": 16,
        "f_info_records": 80,
        "b_info_records": 80,
        "reference_backward_ops": 4,
        "repeated_records": 96,
        "differing_elements": 0,
        "compared_elements": 256,
    }


def test_network(document: Document) -> None:
    described = network_graph((1, 1, 16, 16), LAYERS)
    assert document.graph == described
    assert [tensor.shape for tensor in described.tensors.values() if tensor.kind is Kind.ACTIVATION] == [
        (1, 1, 16, 16),
        (1, 1, 8, 8),
        (1, 1, 8, 8),
        (1, 1, 4, 4),
    ]


def test_tiles_follow_from_the_description(document: Document) -> None:
    assert document.tiles == tile_schedule(network_graph((1, 1, 16, 16), LAYERS), GRID)


def test_every_printed_value_follows_from_the_description(text: str) -> None:
    graph = network_graph((1, 1, 16, 16), LAYERS)
    schedule, stages = tile_schedule(graph, GRID), stages_of(graph)
    made = [box_tables(stages, schedule, coord) for coord in product(range(4), range(4))]
    program = "\n".join(line.text for line in separate(text)[0])
    assert all(tables in program for tables in made)
    records = [record for tables in made for record in records_in(tables)]
    assert (len(records), sum(map(values_in, records))) == (160, 3360)


def records_in(tables: str) -> list[BoxRecord]:
    lines, _ = separate(tables)
    return [parse_record(lines, at) for at, line in enumerate(lines) if " PI( <" in line.text]


def values_in(record: BoxRecord) -> int:
    lists = (
        record.otileshape,
        record.padding,
        record.inpslidx,
        record.internal,
        record.realidx,
        record.ndtsize,
    )
    key_flag_and_next = 3
    return len(record.position) + len(record.coord) + sum(map(len, lists)) + key_flag_and_next


def test_nothing_in_the_log_contradicts_the_windows(document: Document) -> None:
    assert {note.kind for note in document.notes} == {NoteKind.INFERRED}


def test_backward_runs_in_reverse_tile_order(document: Document) -> None:
    assert document.tiles is not None
    assert list(document.tiles.backward) == list(reversed(list(document.tiles.forward)))


def test_input_tiles_are_disjoint_and_output_regions_are_not(document: Document) -> None:
    assert document.tiles is not None
    owned = [steps[0].result for steps in document.tiles.backward.values()]
    assert are_disjoint(owned)
    assert covers(owned, Rect.of_shape((16, 16)))
    made = [steps[0].result for steps in document.tiles.forward.values()]
    assert sum(rect.volume for rect in made) == 100  # for 16 cells


def test_tiles_multiply_eight_times_as_much(document: Document) -> None:
    assert document.tiles is not None
    untiled = {op.id: macs_of(site_of(document.graph, op)) for op in document.graph.ops}
    per_output = {
        stage.op.id: untiled[stage.op.id] // Rect.of_shape(stage.outputs).volume
        for stage in stages_of(document.graph)
    }
    tiled = sum(
        step.result.volume * per_output[step.op]
        for steps in document.tiles.forward.values()
        for step in steps
    )
    assert (tiled, facts_of(document.graph).costs.forward_macs) == (24_336, 2_880)


def test_what_is_written_is_read_back(document: Document) -> None:
    written = tilelog.write(document)
    assert tilelog.recognise(written)
    again = tilelog.read(written)
    assert (again.graph, again.tiles) == (document.graph, document.tiles)
    assert again.counts["compared_elements"] == 256


def test_other_networks_and_grids_are_written_and_read_back() -> None:
    layers = (
        Layer("1", "conv2d", (5, 3), (1, 2), (2, 0), channels=4),
        Layer("2", "conv2d", (1, 3), (1, 1), (0, 1), channels=2),
        Layer("3", "maxpool2d", (3, 3), (2, 2), (1, 1)),
    )
    graph = network_graph((2, 3, 20, 31), layers)
    made = Document(tilelog.FORMAT, graph, tiles=tile_schedule(graph, (2, 3)))
    again = tilelog.read(tilelog.write(made))
    assert (again.graph.ops, again.tiles) == (graph.ops, made.tiles)


def test_writing_needs_tiles_and_numbers_for_ids(document: Document) -> None:
    with pytest.raises(BadUse, match="none"):
        tilelog.write(replace(document, tiles=None))
    graph = network_graph((1, 1, 8, 8), [replace(LAYERS[0], id="conv")])
    with pytest.raises(BadUse, match="numbers"):
        tilelog.write(Document(tilelog.FORMAT, graph, tiles=tile_schedule(graph, (2, 2))))


def test_a_box_that_contradicts_the_windows_is_noted(text: str) -> None:
    changed = text.replace("<realidx 2,7,4,7,>", "<realidx 2,8,4,7,>", 1)
    line = changed[: changed.index("2,8,4,7")].count("\n") + 1
    odd = [note for note in tilelog.read(changed).notes if note.kind is NoteKind.ODD]
    assert [note.where for note in odd] == [f"line {line - 5}"]  # a record is told by its first line


def test_lines_cut_by_the_engine_keep_their_number() -> None:
    call = "[torch/csrc/autograd/engine.cpp] call_function SumBackward0\n"
    lines, calls = separate(f"one\ntw{call}{call}o\nthree\n")
    assert [(line.number, line.text) for line in lines] == [(1, "one"), (2, "two"), (5, "three"), (6, "")]
    assert calls == ("SumBackward0", "SumBackward0")


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("after maxpool2d 1x1x8x8", "after softmax 1x1x8x8", 8),
        ("after maxpool2d 1x1x8x8", "after maxpool2d 1x1x9x8", 8),
        ("after maxpool2d 1x1x8x8", "", 7),
        (" <otileshape 2,2,>,", " <otileshape 2,2,2,>,", 19),
        (" <padding >,", " <inpslidx >,", 20),
        ("  local_first False", "  local_first Maybe", 25),
        (" next_id -11)", " next_id )", 26),
        (", 139784839957760: maxpool", ", 39784839957761: maxpool", 27),
        ("maxpool2d139784839957760[0,-1] PI( <0,0,>", "maxpool2d139784839957760[0,-1] PI( <0,1,>", 18),
        ("fake[-11,-11] PI( <0,0,>", "fake[-11,-11] PI( <9,9,>", 18),
    ],
)
def test_faults_are_told_with_their_line(text: str, old: str, new: str, line: int) -> None:
    with pytest.raises(BadInput) as caught:
        tilelog.read(text.replace(old, new, 1))
    assert caught.value.where == f"line {line}"


@pytest.mark.parametrize("lines", [0, 5, 13, 100])
def test_a_log_cut_before_its_tiles_end_is_refused(text: str, lines: int) -> None:
    with pytest.raises(BadInput):
        tilelog.read("\n".join(text.split("\n")[:lines]))


def test_a_log_without_a_verdict_is_noted(text: str) -> None:
    document = tilelog.read(text[: text.index(" precentile")])
    assert "compared_elements" not in document.counts
    assert [note.what for note in document.notes if note.kind is NoteKind.ODD] == [
        "no comparison of gradients follows the tiles"
    ]
