"""What people see of an inspection: the right figures, in lines that fit and harm no terminal."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from rich.console import Console

from stowplan import api
from stowplan.analyse.inspection import Inspection, inspection_of
from stowplan.ir import Document, Note, NoteKind
from stowplan.report.inspect import show_inspection
from stowplan.report.inspect_json import inspection_json
from tests.support.graphs import documents
from tests.support.steps import training_step


def shown(
    inspection: Inspection, *, all_notes: bool = False, encoding: str = "utf-8", width: int = 100
) -> str:
    """The text of a report on a console that is no terminal."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    console = Console(file=stream, width=width, highlight=False, markup=False, emoji=False)
    show_inspection(inspection, console, title="folder/step.txt", all_notes=all_notes)
    stream.seek(0)
    return stream.read()


@given(documents(sized=True))
@settings(max_examples=50)
@pytest.mark.slow
def test_whatever_a_file_holds_is_shown_in_lines_that_fit(document: Document) -> None:
    inspection = inspection_of(document)
    lines = shown(inspection, all_notes=True).split("\n")
    assert all(line == line.rstrip() and (not line or line.isprintable()) for line in lines)
    assert all(len(line) <= 100 for line in lines)
    assert json.loads(json.dumps(inspection_json(inspection)))["ops"]["total"] == len(document.graph.ops)


def test_the_report_of_a_step() -> None:
    inspection = inspection_of(Document("stow", training_step(800)))
    peak = inspection.facts.peak
    report = shown(inspection)
    assert report.startswith("step.txt: stow\n")
    for line in (
        "  ops               802  401 forward, 401 backward",
        f"  peak          152 MiB  {peak.bytes:,} B while block99.add.backward runs",
        "  forward                                          backward",
        "  512 KiB  input       float32 8x16x32x32  data",
        f"  147 MiB  {len(peak.tensors) - 10:,} more",
    ):
        assert f"\n{line}\n" in report


def test_the_peak_is_marked_above_the_highest_column() -> None:
    lines = shown(inspection_of(Document("stow", training_step(800)))).split("\n")
    at = lines.index("memory while each op runs")
    mark, top = lines[at + 1], lines[at + 2]
    assert top[mark.index("v")] == "█"
    assert set(top) <= set(" ▁▂▃▄▅▆▇█")


@pytest.mark.parametrize("width", [50, 60, 80])
def test_bars_are_as_long_as_their_shares_on_any_width(width: int, dump: Callable[[str], Path]) -> None:
    report = shown(api.inspect(dump("megengine")), width=width)
    kinds = report.partition("bytes by kind\n")[2].partition("\n\n")[0].splitlines()
    longest, second, *_ = lengths = [line.count("█") for line in kinds]
    assert not any("…" in line for line in report.splitlines() if "█" in line)
    assert longest > 10
    assert lengths == sorted(lengths, reverse=True)
    assert abs(second / longest - 97.4 / 1009) <= 1 / longest


def test_a_console_without_blocks_gets_letters() -> None:
    report = shown(inspection_of(Document("stow", training_step(80))), encoding="ascii")
    assert report.isascii()
    assert "###" in report


def test_notes_that_are_alike_are_one_line_unless_all_are_asked_for() -> None:
    notes = [Note(NoteKind.REPAIRED, f"line {i}", f"read 'x.{i}', became 'y.{i}'") for i in range(30)]
    document = Document(
        "stow", training_step(8), notes=(*notes, Note(NoteKind.ODD, "line 9", "kept as it is"))
    )
    short, full = shown(inspection_of(document)), shown(inspection_of(document), all_notes=True)
    assert "  repaired  line 0  read 'x.0', became 'y.0'  (and 29 like it)\n" in short
    assert (short.count("became"), full.count("became")) == (1, 30)
    assert "notes of the reader (31)" in short


@pytest.mark.parametrize("name", ["chainer", "megengine", "regiongraph", "tensorflow", "tilelog"])
@pytest.mark.slow
def test_every_document_has_a_report(name: str, dump: Callable[[str], Path]) -> None:
    report = shown(api.inspect(dump(name)))
    assert max(map(len, report.split("\n"))) <= 100
    assert "memory while each op runs" in report


def test_packing_can_be_left_out_and_asked_for() -> None:
    document = Document("stow", training_step(80))
    assert "too many tensors; --pack" in shown(inspection_of(document, packed=False))
    assert "in one arena, 0.00% over" in shown(inspection_of(document, packed=True))
    assert inspection_json(inspection_of(document, packed=False))["packing"] is None
