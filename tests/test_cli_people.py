"""What people read on a terminal tells what the JSON of the same verb tells."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from stowplan import Search
from stowplan.cli.main import main
from stowplan.formats.door import read_document
from stowplan.ir import Kind
from stowplan.plan.draft import Exactness
from stowplan.plan.files import plan_file
from stowplan.plan.options import PlanOptions
from stowplan.plan.plan import Plan
from stowplan.plan.planner import Planner
from stowplan.plan.prices import price_by_macs
from stowplan.plan.select import Tradeoff, planner_of
from stowplan.plan.steps import Keep, Offload, Recompute
from stowplan.report.plan import show_frontier
from stowplan.report.simulate import show_projections
from stowplan.techniques.shards.plan.mesh import parse_mesh
from stowplan.techniques.shards.plan.projection import MeshProjection
from stowplan.units import format_bytes
from tests.support.plans import moved

SAMPLE = Path(__file__).parent / "formats" / "samples" / "chainer.txt"


@pytest.fixture(scope="module")
def planner() -> Planner:
    graph = read_document(SAMPLE, saved="retain").graph
    return Planner.of(graph, price_by_macs(graph), options=PlanOptions(search=Search(moves=300)))


@pytest.fixture(scope="module")
def tight(planner: Planner) -> Plan:
    """Some tensors are kept, some recomputed."""
    return planner.plan(planner.minimum_bytes)


def _saved(plan: Plan, folder: Path) -> str:
    path = folder / "plan.json"
    path.write_text(plan_file.write(plan), encoding="utf-8")
    return str(path)


def _said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_frontier_has_a_row_from_the_smallest_budget_to_the_baseline() -> None:
    graph = read_document(SAMPLE, saved="retain").graph
    planner = planner_of(
        graph, price_by_macs(graph), options=PlanOptions(allow=("recompute",), search=Search(moves=100))
    )
    console = Console(file=StringIO(), width=100)
    show_frontier(planner.tradeoffs(), planner.baseline.seconds, console)
    assert isinstance(console.file, StringIO)
    heading, *rows = console.file.getvalue().split("\n")
    assert heading == "budget and time against the baseline"
    assert rows[0].split()[:2] == format_bytes(planner.minimum_bytes).split()
    assert "1.0000" in rows[len(planner.tradeoffs()[:16]) - 1]


def test_the_frontier_tells_the_smallest_budgets_and_when_tiles_are_faster() -> None:
    offers = (
        Tradeoff(1 << 20, 2.0, Exactness.ROUNDING),
        Tradeoff(2 << 20, 1.5, Exactness.BITWISE),
        Tradeoff(3 << 20, 1.0, Exactness.BITWISE),
    )
    console = Console(file=StringIO(), width=80)
    show_frontier(offers, 1.0, console, faster=Tradeoff(2 << 20, 1.25, Exactness.ROUNDING))
    assert isinstance(console.file, StringIO)
    said = console.file.getvalue()
    assert "smallest budget: 2.00 MiB with the same bits, 1.00 MiB within rounding" in said
    assert "tiles would be faster here, 1.2500 at 2.00 MiB: --prefer time" in said


def test_lines_keep_to_the_columns_that_are_told(
    tight: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = _saved(tight, tmp_path)
    recomputed = next(name for name, each in tight.decisions.items() if isinstance(each, Recompute))
    for words in (("inspect", str(SAMPLE)), ("explain", saved, recomputed), ("compare", saved, saved)):
        for columns in (80, 60, 40):
            monkeypatch.setenv("COLUMNS", str(columns))
            main([*words])
            assert max(map(len, capsys.readouterr().out.splitlines())) <= columns


@pytest.mark.parametrize("columns", [80, 40])
def test_a_simulated_mesh_fits_into_narrow_terminals(columns: int) -> None:
    many = MeshProjection(
        mesh=parse_mesh("data=4096"),
        compute_seconds=1.0,
        network_seconds=0.2,
        waiting_seconds=0.034,
        sent_bytes=123 << 20,
        summed_bytes=123 << 20,
        peak_bytes=123 << 20,
        planning_seconds=1.5,
        planner_bytes=321 << 20,
        gathered={},
    )
    console = Console(file=StringIO(), width=columns)
    show_projections("train:step", many, [many, many], [], {}, console)
    assert isinstance(console.file, StringIO)
    said = console.file.getvalue()
    assert max(map(len, said.splitlines())) <= columns
    assert said.count("123 MiB") == 9  # none is cut
    assert "efficiency" in said
    assert "planned in 1.50 s with 321 MiB at most, each" in " ".join(said.split())


def test_a_tensor_is_explained_in_words(
    tight: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = _saved(tight, tmp_path)
    decided = {type(decision): name for name, decision in tight.decisions.items()}
    assert decided.keys() == {Keep, Recompute}
    for kind, word in ((Keep, "decided kept"), (Recompute, "recomputed")):
        said = _said(capsys, "explain", saved, decided[kind])
        told = json.loads(_said(capsys, "explain", saved, decided[kind], "--json"))
        assert word in said
        assert f"made by {told['maker']}" in said
        assert told["otherwise"] in said
    weight = next(tensor.id for tensor in tight.graph.tensors.values() if tensor.kind is Kind.PARAMETER)
    assert "nothing: the planner has no choice" in _said(capsys, "explain", saved, weight)


def test_a_tensor_that_is_moved_is_followed_out_and_back(
    planner: Planner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = moved(planner.plan(planner.plain_peak_bytes))
    name = next(name for name, decision in plan.decisions.items() if isinstance(decision, Offload))
    said = _said(capsys, "explain", _saved(plan, tmp_path), name)
    assert "offloaded to host" in said
    assert said.index("stored begun as op") < said.index("loaded begun as op") < said.index("waited for")
