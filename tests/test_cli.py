"""The command line: what it says of the five documents, how it refuses, and how fast it starts."""

import json
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from stowplan import __version__
from stowplan.cli.main import VERBS, main, parser_of
from stowplan.formats import stow
from stowplan.formats.door import read_document
from stowplan.ir.text import parse_graph
from tests.support.timing import timed

GRAPH = """\
stowplan graph 1
parameter W: float32[4,4] bytes=64
input x: float32[1,4] bytes=16
held activation y: float32[1,4] bytes=16
forward fc: MatMul(x, W) -> (y)
"""

GOLDEN: dict[str, dict[str, object]] = {
    "chainer": {
        "format": "chainer",
        "ops.total": 120,
        "ops.by_phase": {"forward": 60, "backward": 60},
        "ops.by_type.ReLU": 22,
        "ops.by_type.Convolution2DFunction": 19,
        "tensors.by_kind.parameter": 46,
        "tensors.by_kind.input": 2,
        "tensors.by_kind.activation": 60,
        "bytes.by_kind.parameter": 124_401_416,
        "bytes.by_kind.activation": 11_781_604_356,
        "macs": {"forward": 1_258_354_034_688, "step": 3_773_564_964_864},
        "peak.bytes": 7_938_850_064,
        "peak.op": "conv_u0b_c.90.backward",
        "lower_bound_bytes": 2_956_736_264,
        "packing.max_live_bytes": 7_938_850_064,
        "counts.variables": 108,
        "counts.shapes": 108,
        "counts.forward_inputs": 111,
        "counts.backward_inputs": 175,
        "counts.gradients_with_two_producers": 4,
        "counts.forward_edges_out_of_file_order": 25,
        "counts.backward_edges_out_of_file_order": 38,
    },
    "megengine": {
        "format": "megengine",
        "ops.total": 234,
        "ops.by_type.ConvolutionForward": 53,
        "ops.by_type.Elemwise": 69,
        "tensors.total": 299,
        "bytes.by_kind.constant": 102_106_528,
        "flops.recorded": 81_954_092_640,
        "peak.bytes": 96_337_920,
        "peak.op": "563",
        "peak.with_constants_bytes": 198_444_448,
        "peak.in_place_bytes": 72_272_896,
        "packing.max_live_bytes": 96_337_920,
        "allocation.tensors": 189,
        "allocation.start_addresses": 17,
        "allocation.touched_bytes": 102_443_008,
        "allocation.overlaps": [],
        "allocation.views": [["832", "841"]],
        "counts.operators": 240,
        "counts.input_edges": 257,
        "counts.chunks": 104,
        "counts.footprint_bytes": 2_551_250_656,
    },
    "regiongraph": {
        "format": "regiongraph",
        "ops.total": 41,
        "tensors.total": 34,
        "tensors.by_kind": {"gradient": 15, "activation": 12, "parameter": 7},
        "bytes.total": 3_074_943_528,
        "bytes.by_kind.parameter": 4 * 293_629_250,
        "macs.forward": 75_139_301_376,
        "counts.rects": 96,
        "counts.none_rects": 7,
        "counts.dims": 58,
        "counts.edges": 98,
        "counts.edge_labels": 88,
    },
    "tensorflow": {
        "format": "tensorflow",
        "counts.rows": 178,
        "counts.ops": 44,
        "counts.transposes": 18,
        "counts.kernels": 62,
        "counts.edges": 134,
        "counts.edges_consistent": 134,
        "counts.control_edges": 18,
        "counts.copied_bytes": 9_878_784,
        "bytes.by_kind.parameter": 9_878_784,
        "bytes.by_kind.input": 77_070_336,
        "bytes.made_by_phase.forward": 975_503_360,
        "bytes.made_by_phase.backward": 728_710_400,
        "bytes.made_by_phase.layout": 1_122_598_912,
        "macs": {"forward": 84_242_595_840, "step": 243_402_276_864},
        "peak.bytes": 949_338_368,
        "peak.op": "gradients/conv5/Conv2D_grad/Conv2DBackpropFilter",
        "peak.without_layout_bytes": 611_568_384,
    },
    "tilelog": {
        "format": "tilelog",
        "ops.by_type": {"conv2d": 2, "maxpool2d": 2},
        "macs.forward": 2_880,
        "tiles.tiles": 16,
        "tiles.forward_macs": 24_336,
        "tiles.untiled_macs": 2_880,
        "tiles.writes": 100,
        "tiles.cells": 16,
        "counts.lines": 5_127,
        "counts.engine_calls": 118,
        "counts.differing_elements": 0,
        "counts.compared_elements": 256,
    },
}


def found(record: dict[str, Any], path: str) -> object:
    value: Any = record
    for key in path.split("."):
        value = value[key]
    return value


@pytest.fixture
def inspected(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """What `stowplan inspect --json` prints, read back."""

    def inspect(*words: str | Path) -> dict[str, Any]:
        assert main(["inspect", "--json", *map(str, words)]) == 0
        record: dict[str, Any] = json.loads(capsys.readouterr().out)
        return record

    return inspect


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.slow
def test_golden_numbers(
    name: str, dump: Callable[[str], Path], inspected: Callable[..., dict[str, Any]]
) -> None:
    record = inspected(dump(name))
    assert {path: found(record, path) for path in GOLDEN[name]} == GOLDEN[name]
    assert record["packing"]["gap"] <= 0.01
    assert record["peak"]["bytes"] >= record["lower_bound_bytes"]


def test_the_retained_view_of_chainer(
    dump: Callable[[str], Path], inspected: Callable[..., dict[str, Any]]
) -> None:
    record = inspected("--saved", "retain", dump("chainer"))
    assert record["peak"]["bytes"] == 7_413_120_272
    assert record["lower_bound_bytes"] == 2_324_568_072


def test_layouts_may_be_chosen_for_a_file(
    dump: Callable[[str], Path], inspected: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    record = inspected("--layouts", "chosen", dump("tensorflow"))
    assert record["peak"]["bytes"] == 611_568_384
    assert "0 changes of layout where the file has 18" in record["notes"][-1]["what"]
    assert main(["plan", str(dump("tensorflow")), "--budget", "1GiB"]) == 0
    assert "18 changes of layout copy 1.05 GiB; --layouts chosen needs 0" in capsys.readouterr().out
    assert main(["plan", str(dump("tensorflow")), "--budget", "500MiB", "--layouts", "chosen"]) == 0
    shown = capsys.readouterr().out
    assert "baseline 583 MiB" in shown
    assert "in chosen layouts" in shown


def test_layouts_are_not_chosen_where_times_or_a_model_decide(
    dump: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "--layouts", "chosen", str(dump("megengine"))]) == 2
    assert "not of their kernels for another layout" in capsys.readouterr().err
    assert main(["plan", "train:step", "--layouts", "chosen", "--budget", "1GiB"]) == 2
    assert "layouts is for files" in capsys.readouterr().err


def test_addresses_of_a_plan_beside_those_of_the_file(
    dump: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(dump("megengine")), "--budget", "190MiB"]
    assert main(words) == 0
    assert "addresses: 68.9 MiB in one arena, 97.7 MiB at those of the file" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    addresses = json.loads(capsys.readouterr().out)["addresses"]
    assert addresses["arena_bytes"] == 72_272_896
    assert addresses["recorded_bytes"] == 102_443_008
    placed = addresses["tensors"]
    for one, other in combinations(placed, 2):
        meet = one["first_step"] < other["last_step"] and other["first_step"] < one["last_step"]
        below = one["offset"] + one["nbytes"] <= other["offset"]
        assert not meet or below or other["offset"] + other["nbytes"] <= one["offset"]


def test_times_of_the_profile(dump: Callable[[str], Path], inspected: Callable[..., dict[str, Any]]) -> None:
    profile = inspected(dump("megengine"))["profile"]
    assert profile["host"]["span_seconds"] == pytest.approx(3.895e-3, abs=5e-7)
    assert profile["device"]["span_seconds"] == pytest.approx(22.797e-3, abs=5e-7)
    assert profile["device"]["seconds_by_type"]["ConvolutionForward"] == pytest.approx(15_390.8e-6, abs=5e-8)
    assert list(profile["device"]["top_ops"])[:4] == ["802", "819", "782", "539"]


@pytest.mark.parametrize("name", GOLDEN)
def test_a_converted_document_is_the_same_document(
    name: str, dump: Callable[[str], Path], tmp_path: Path
) -> None:
    target = tmp_path / "same.stow.json"
    assert main(["convert", str(dump(name)), str(target)]) == 0
    original, copy = read_document(dump(name)), read_document(target)
    assert (copy.graph, copy.profile, copy.allocation) == (
        original.graph,
        original.profile,
        original.allocation,
    )
    assert (copy.regions, copy.tiles) == (original.regions, original.tiles)
    assert (copy.notes, copy.counts) == (original.notes, original.counts)


@pytest.mark.parametrize("name", ["chainer", "regiongraph", "tilelog"])
def test_a_format_that_can_be_written_is_read_again(
    name: str, dump: Callable[[str], Path], tmp_path: Path
) -> None:
    target = tmp_path / "again"
    assert main(["convert", str(dump(name)), str(target), "--to", name]) == 0
    original, again = read_document(dump(name)), read_document(target)
    assert (again.format, again.graph) == (name, original.graph)
    assert (again.regions, again.tiles) == (original.regions, original.tiles)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.stow.txt"
    path.write_text(GRAPH)
    return path


def refusal(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """What a refused call says on stderr; it says nothing else."""
    assert main([*map(str, words)]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.startswith("stowplan: ")
    return captured.err


def test_what_a_format_cannot_carry_is_refused(
    dump: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "graph.stow.txt"
    assert "no place for the document's profile and allocation" in refusal(
        capsys, "convert", dump("megengine"), target
    )
    assert not target.exists()
    assert main(["convert", "--json", "--graph-only", str(dump("megengine")), str(target)]) == 0
    said = {"file": str(target), "from": "megengine", "ops": 234, "tensors": 299}
    assert json.loads(capsys.readouterr().out) == said
    assert parse_graph(target.read_text()) == read_document(dump("megengine")).graph


def test_refusals_name_the_file_and_the_reason(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "nowhere.txt: does not exist" in refusal(capsys, "inspect", tmp_path / "nowhere.txt")
    assert "chainer files only" in refusal(capsys, "inspect", "--saved", "retain", small)
    assert "does not say its format" in refusal(capsys, "convert", small, tmp_path / "out.bin")
    assert "cannot be written" in refusal(capsys, "convert", small, tmp_path / "no" / "folder.stow.json")
    strange = tmp_path / "strange.txt"
    strange.write_text("what is this\n")
    assert "strange.txt: line 1: begins like none of the formats" in refusal(capsys, "inspect", strange)
    strange.write_text(GRAPH + "forward \x1b[31m\n")
    assert "\x1b" not in refusal(capsys, "inspect", strange)


def test_a_graph_without_sizes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "unsized.stow.txt"
    path.write_text(GRAPH.replace(" bytes=64", ""))
    assert "the bytes of tensor 'W' are not known" in refusal(capsys, "inspect", path)


@pytest.mark.parametrize("words", [[], ["sail"], ["inspect"], ["inspect", "--colour", "x"], ["convert", "x"]])
def test_bad_use_ends_with_two(words: list[str]) -> None:
    assert main(words) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["plna", "x"], "no 'plna' (did you mean 'plan'?)"),
        (["plan", "x", "--budgt", "1"], "unrecognized arguments: --budgt 1 (did you mean '--budget'?)"),
        (["plan", "x", "--prefer", "tame"], "--prefer: no 'tame' (did you mean 'time'?)"),
        (["plan", "x", "--gap", "wide"], "--gap is 'wide', which is no number"),
        (["plan", "x", "--budget"], "--budget is given no value"),
    ],
)
def test_a_misspelt_command_line_is_told_the_nearest(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert f"stowplan: {told}" in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("stowplan expl", ["explain"]),
        ("stowplan --ver", ["--version"]),
        ("stowplan plan --allo", ["--allow", "--allocator"]),
        ("stowplan plan train:step --prefer t", ["time"]),
        ("stowplan check --bud", ["--budget"]),
        ("stowplan plan train", []),
    ],
)
def test_bash_completes_verbs_options_and_their_words(
    line: str, completed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--completion", "bash"])
    words = line.split()
    asked = f'COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _stowplan; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        ["bash", "-c", f"{capsys.readouterr().out}\n{asked}"], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert done.stdout.split() == completed


def test_the_page_for_man_has_every_verb_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--man"])
    page = capsys.readouterr().out.replace("\\-", "-")
    for verb in VERBS:
        assert f"\n.SS {verb}\n" in page
        assert all(flag in page for flag in re.findall(r"(?<![\w-])--[\w-]+", parser_of(verb).format_help()))
    assert not re.search(r"(?m)^'", page)
    if groff := shutil.which("groff"):
        done = subprocess.run(
            [groff, "-man", "-Tascii", "-ww"], input=page, capture_output=True, text=True, check=True
        )
        assert done.stderr == "", "groff warns"


def stowplan(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-c", "import sys; from stowplan.cli.main import main; sys.exit(main())"]
    return subprocess.run([*command, *map(str, words)], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_reader_who_leaves_early_is_no_error(small: Path) -> None:
    command = f"{sys.executable} -c 'import sys; from stowplan.cli.main import main; sys.exit(main())'"
    shell = f"set -o pipefail; {command} inspect --json {small} | true; echo $?"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("0\n", "")


def seconds_of_children() -> float:
    """Processor time of the processes that were started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@timed
def test_starting_is_fast() -> None:
    seconds = []
    for _ in range(5):
        begin = seconds_of_children()
        assert stowplan("--help").returncode == 0
        seconds.append(seconds_of_children() - begin)
    assert min(seconds) <= 0.3


@pytest.mark.slow
def test_a_digest_that_does_not_fit_is_told(small: Path, tmp_path: Path) -> None:
    target = tmp_path / "small.stow.json"
    assert stowplan("convert", small, target).returncode == 0
    assert stow.recognise(target.read_text())
    target.write_text(target.read_text().replace('"nbytes":64', '"nbytes":65'))
    done = stowplan("inspect", target)
    assert (done.returncode, done.stdout) == (2, "")
    assert "changed or damaged" in done.stderr


def test_an_internal_error_asks_for_a_report(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> int:
        raise KeyError("lost")

    monkeypatch.setattr("stowplan.cli.inspect.run", broken)
    monkeypatch.delenv("STOWPLAN_TRACEBACK", raising=False)
    assert main(["inspect", str(small)]) == 3
    said = capsys.readouterr().err
    assert f"stowplan inspect {small}" in said
    assert "KeyError: 'lost'" in said
    assert "Traceback" not in said
    monkeypatch.setenv("STOWPLAN_TRACEBACK", "1")
    assert main(["inspect", str(small)]) == 3
    assert "Traceback" in capsys.readouterr().err


def test_names_of_files_do_not_steer_the_terminal(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (
        ["convert", str(small), str(tmp_path / "x\x1b[2J.stow.json")],
        ["report", str(small), "-o", str(tmp_path / "x\x1b[2J.csv")],
    ):
        assert main(words) == 0
        assert "\x1b" not in capsys.readouterr().out


def test_cells_of_a_table_are_never_formulas(tmp_path: Path) -> None:
    path = tmp_path / "formula.stow.txt"
    path.write_text('stowplan graph 1\nheld input "=cmd|calc": float32[1] bytes=4 name="@SUM(1)"\n')
    assert main(["report", str(path), "-o", str(tmp_path / "x.csv")]) == 0
    assert (tmp_path / "x.csv").read_text().splitlines()[1].startswith('"\'=cmd|calc","\'@SUM(1)"')
