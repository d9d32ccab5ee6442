"""`stowplan plan` on documents that are no training step of the usual kind: it answers, or says why not."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stowplan.api import read_document
from stowplan.cli.main import main
from stowplan.techniques.shards.plan.seeds import step_of_document
from stowplan.techniques.shards.plan.text import load_plan, read_sheet

_FORWARD_ONLY = ("megengine", "tilelog")


@pytest.mark.parametrize("name", [*_FORWARD_ONLY, "regiongraph"])
@pytest.mark.parametrize("budget", ["1", "60MiB", "2.44GiB"])
@pytest.mark.slow
def test_every_budget_of_a_document_is_answered(
    name: str, budget: str, dump: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(dump(name)), "--budget", budget]
    code = main([*words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (0 if found["feasible"] else 1)
    assert found["minimum_bytes"] is None or found["minimum_bytes"] > 1
    if found["feasible"]:
        assert found["has_backward"] is (name not in _FORWARD_ONLY)
    assert main(words) == code


@pytest.mark.parametrize("name", [*_FORWARD_ONLY, "regiongraph"])
@pytest.mark.slow
def test_a_document_has_a_frontier(
    name: str, dump: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(dump(name)), "--frontier", "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["frontier"]
    assert main(["plan", str(dump(name)), "--budget", str(points[0]["budget_bytes"])]) == 0


@pytest.mark.slow
def test_a_graph_without_a_backward_half_says_that_nothing_is_recomputed(
    dump: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    document = str(dump("megengine"))
    assert main(["plan", document, "--budget", "1GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["projected_peak_bytes"] == found["packed_bytes"] < found["plain_peak_bytes"]
    assert main(["plan", document, "--budget", "1GiB"]) == 0
    assert "nothing: the graph has no backward half" in capsys.readouterr().out
    assert main(["plan", document, "--budget", "1"]) == 1
    assert "no backward half, so there is nothing to recompute" in capsys.readouterr().err


def test_a_view_of_saved_tensors_is_refused_for_other_documents(
    dump: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(dump("megengine")), "--budget", "1GiB", "--saved", "retain"]) == 2
    assert "chainer files only" in capsys.readouterr().err


def test_a_graph_without_ops_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.stow.txt"
    path.write_text("stowplan graph 1\n")
    for asked in (["--budget", "1GiB"], ["--frontier"]):
        assert main(["plan", str(path), *asked]) == 2
        assert "has no ops" in capsys.readouterr().err


def test_an_op_without_its_operands_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lacking.stow.txt"
    path.write_text(
        "stowplan graph 1\ninput x: float32[1,2,4,4] bytes=128\n"
        "held activation y: float32[1,2,4,4] bytes=128\n"
        "forward lacking: conv2d(x) -> (y)\n"
    )
    for words in (["inspect", str(path)], ["plan", str(path), "--budget", "1GiB"]):
        assert main(words) == 2
        assert "op 'lacking' lacks what a 'conv2d' has" in capsys.readouterr().err


@pytest.mark.parametrize("mesh", ["data=1", "data=2", "data=2,space=2", "data=4,space=2x2"])
def test_the_parts_of_a_region_graph_are_written_for_other_numbers_of_workers(
    mesh: str, dump: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, written = dump("regiongraph"), tmp_path / "regions.txt"
    words = ["simulate", str(path), "--mesh", mesh, "--up-to", "1", "--regions", str(written), "--json"]
    assert main(words) == 0
    shown = json.loads(capsys.readouterr().out)
    document = read_document(str(path))
    plan = load_plan(written.read_text(), step_of_document(document.graph), ["classifier.evaluate.ouptut"])
    first = read_sheet(written.read_text()).workers[0].tensors
    assert (str(plan.mesh), plan.mesh.size) == (shown["mesh"], shown["workers"])
    assert document.regions is not None
    of_file = {name: document.regions.tensors[name].read for name in first if first[name].read is not None}
    is_same = of_file == {name: region.read for name, region in first.items() if region.read is not None}
    assert is_same is (mesh == "data=1")  # the file is of one worker
    image = first["data.raw_output"]
    assert image.read is not None
    assert image.write is not None
    has_halo = any(high > own for high, own in zip(image.read.hi, image.write.hi, strict=True))
    assert has_halo is ("space" in mesh)
