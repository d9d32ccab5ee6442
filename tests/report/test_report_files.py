"""Report and compare from the command line: the suffix decides, and what cannot be done is refused."""

import csv
import io
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings

from stowplan.cli.main import main
from stowplan.ir import Document
from stowplan.plan.files import plan_file, record_file
from stowplan.plan.plan import Plan
from stowplan.plan.record import Difference, Record
from stowplan.report.files import COLUMNS, tensors_csv
from stowplan.report.notebook import show
from stowplan.report.page import page_of, subject_of
from stowplan.report.page.data import data_of
from stowplan.report.picture import svg_of
from stowplan.report.trace import trace_of
from stowplan.units import format_bytes
from tests.support.graphs import documents
from tests.support.pages import plan_of

Dump = Callable[[str], Path]

OPENING = {
    ".html": b"<!doctype html>",
    ".json.gz": b"\x1f\x8b",
    ".svg": b"<svg",
    ".png": b"\x89PNG",
    ".csv": b'"id","name"',
}


@pytest.fixture
def plan(dump: Dump) -> Plan:
    return plan_of(dump("chainer"))


@pytest.fixture
def plan_path(plan: Plan, tmp_path: Path) -> Path:
    path = tmp_path / "tight.plan.json"
    path.write_text(plan_file.write(plan), encoding="utf-8")
    return path


@pytest.fixture
def record_path(plan: Plan, tmp_path: Path) -> Path:
    curve = (plan.projected_peak_bytes // 2, plan.projected_peak_bytes)
    record = Record(plan, "cpu", curve, (0.0, 1.0), 2.0, 10**10, 1.6, (Difference("w", 0.0, 1.0),))
    path = tmp_path / "run.record.json"
    path.write_text(record_file.write(record), encoding="utf-8")
    return path


@given(documents(sized=True))
@settings(max_examples=40)
@pytest.mark.slow
def test_whatever_a_document_holds_can_be_drawn(document: Document) -> None:
    subject = subject_of(document, "any")
    page = page_of([subject])
    assert page.isascii()
    assert trace_of([subject])
    ElementTree.fromstring(svg_of(subject))
    rows = list(csv.reader(io.StringIO(tensors_csv(subject), newline="")))
    assert len(rows) == 1 + len(document.graph.tensors)
    assert all(len(row) == len(COLUMNS) for row in rows)


@pytest.mark.parametrize(
    "suffix",
    [pytest.param(suffix, marks=[pytest.mark.browser] * (suffix == ".png")) for suffix in OPENING],
)
@pytest.mark.slow
def test_each_suffix_writes_its_kind(
    suffix: str, plan_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / f"out{suffix}"
    assert main(["report", str(plan_path), "-o", str(target), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"file": str(target), "bytes": target.stat().st_size, "subjects": ["tight.plan.json"]}
    assert target.read_bytes().startswith(OPENING[suffix])


@pytest.mark.slow
def test_the_same_thing_is_written_the_same(plan_path: Path, tmp_path: Path) -> None:
    for suffix in (".html", ".json.gz"):
        one, two = tmp_path / f"one{suffix}", tmp_path / f"two{suffix}"
        for target in (one, two):
            assert main(["report", str(plan_path), "-o", str(target)]) == 0
        assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["-o", "x.doc"], "none of .html"),
        (["-o", "missing/folder/x.html"], "cannot be written"),
        (["-o", "x.html", "--peers", "missing.json"], "cannot be read"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(
    words: list[str], reason: str, dump: Dump, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(dump("tilelog")), *words]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.slow
def test_a_picture_shows_one_thing(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(plan_path), str(plan_path), "-o", "x.svg"]) == 2
    assert "2 are given" in capsys.readouterr().err


def test_a_damaged_plan_is_named(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_path.write_text(plan_path.read_text()[:-9])
    assert main(["report", str(plan_path), "-o", "x.html"]) == 2
    assert plan_path.name in capsys.readouterr().err


def test_the_picture_has_the_budget_and_every_kind(plan: Plan) -> None:
    picture = svg_of(subject_of(plan, "plan"))
    assert "allowed" in picture
    for kind in ("parameter", "activation", "gradient"):
        assert f">{kind}<" in picture


def test_the_table_says_what_became_of_each_tensor(plan: Plan) -> None:
    rows = list(csv.DictReader(io.StringIO(tensors_csv(subject_of(plan, "plan")))))
    remade = [row for row in rows if row["decision"] == "recompute"]
    assert remade
    assert all(int(row["times_made"]) > 1 for row in remade)
    parameters = [row for row in rows if row["kind"] == "parameter"]
    assert {(row["alive_at_peak"], row["times_made"]) for row in parameters} == {("yes", "0")}


def test_plans_and_runs_are_compared(
    plan_path: Path, record_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(plan_path), str(record_path)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("tight.plan.json -> run.record.json\n")
    assert "measured peak" in told
    assert "fare otherwise" not in told
    assert max(map(len, told.split("\n"))) <= 100


def test_a_plan_is_compared_with_its_document(
    dump: Dump, plan_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", str(dump("chainer")), str(plan_path), "--saved", "retain"]
    assert main(words) == 0
    assert "no longer" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["after"]["peak_bytes"] < told["before"]["peak_bytes"]


@pytest.mark.slow
def test_a_record_is_shown_with_what_it_measured(record_path: Path, tmp_path: Path) -> None:
    record = record_file.read(record_path.read_text())
    assert main(["report", str(record_path), "-o", str(tmp_path / "run.html")]) == 0
    subject = data_of([subject_of(record, "run")], "run")["subjects"]
    assert isinstance(subject, list)
    assert [figure[:2] for figure in subject[0]["figures"][:3]] == [
        ("measured peak", format_bytes(record.plan.projected_peak_bytes)),
        ("measured time", "2.00 s"),
        ("gradients", "the same"),
    ]
    assert {beside["name"] for beside in subject[0]["curve"]["beside"]} == {"baseline", "measured"}


@pytest.mark.slow
def test_notebooks_show_plans_in_a_frame_of_their_own(plan: Plan) -> None:
    shown = show(plan)._repr_html_()
    assert shown.startswith('<iframe sandbox="allow-scripts"')
    assert "<script" not in shown


def test_a_notebook_shows_a_plan_that_a_cell_ends_with(plan: Plan) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    assert shell.display_formatter is not None
    shell.run_line_magic("load_ext", "stowplan.report.notebook")
    shown = shell.display_formatter.formatters["text/html"](plan)
    InteractiveShell.clear_instance()
    assert shown == show(plan)._repr_html_()
