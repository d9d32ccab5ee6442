"""The page of benchmarks: every figure, in order, who is ahead; what people wrote has the same figures."""

import re
from collections import defaultdict
from itertools import count
from pathlib import Path

import pytest

pytest.importorskip("torch")

from torch import Tensor

from benchmarks import compare
from benchmarks.page import html_of, markdown_of, with_others, with_section
from benchmarks.peers import Method, ratios_in_round
from benchmarks.results import Result, Study, ratio_of, read_results
from benchmarks.suite import SUITES

ROOT = Path(__file__).parents[1]


def told(folder: Path, peer_time: float) -> list[Result]:
    """A comparison of three ways, and the figures of a plan."""
    study = Study("peers", folder)
    ways = {"eager": (300, 1.0), "checkpoint per block": (200, peer_time), "stowplan at 200 MiB": (199, 1.1)}
    for way, (peak, time) in ways.items():
        study.tell("net", way, "peak", peak * 2**20, "B")
        study.tell("net", way, "time", time, "of eager", (time - 0.01, time + 0.01))
    Study("planning", folder).tell("gpt, 6 layers", "stowplan", "ops", 1200, "ops")
    Study("planning", folder).tell("gpt, 6 layers", "stowplan", "search", 2.5, "s")
    Study("tiles", folder).tell("net", "eager", "peak", 2**30, "B")
    Study("tiles", folder).tell("net", "tiles", "peak", 2**28, "B")
    return read_results(folder)


def test_the_page_is_whole_and_holds_every_figure(tmp_path: Path) -> None:
    page = html_of(told(tmp_path, 1.3))
    assert page.count("<svg") == 3
    assert not re.search(r'(src|href)="', page)
    for figure in ("300 MiB", "1.100 (1.090 to 1.110)", "256 MiB of 1.00 GiB", "2.50 s", "1,200"):
        assert figure in page
    text, pictures = markdown_of(told(tmp_path, 1.3))
    assert set(re.findall(r"pictures/([\w.-]+)", text)) == set(pictures)


@pytest.mark.parametrize(
    ("peer_time", "verdict"),
    [
        (1.3, "No other method is ahead.\n"),
        (1.1, "Level: net, checkpoint per block: within 200 MiB 1.100 of eager, stowplan 1.100."),
        (1.09, "Level: net, checkpoint per block: within 200 MiB 1.090 of eager, stowplan 1.100."),
        (0.9, "Other methods are ahead here: net, checkpoint per block: within 200 MiB 0.900 of eager"),
    ],
)
def test_a_peer_is_ahead_where_the_quartiles_are_apart(
    tmp_path: Path, peer_time: float, verdict: str
) -> None:
    page, _ = markdown_of(told(tmp_path, peer_time))
    assert verdict in page
    assert ("are ahead here" in page) is (peer_time == 0.9)
    assert ("Level:" in page) is (peer_time in (1.1, 1.09))


def test_one_section_is_written_and_the_others_stay(tmp_path: Path) -> None:
    page, _ = markdown_of(told(tmp_path, 1.3))
    tiles, _ = markdown_of([result for result in told(tmp_path, 1.3) if result.study == "tiles"])
    assert with_section(page, tiles) == page
    changed = with_section(page, tiles.replace("256 MiB", "1 MiB"))
    assert changed != page
    assert with_section(changed, tiles) == page
    new = with_section(page, tiles.replace("## Tiles", "## Others"))
    assert [line for line in new.splitlines() if line.startswith("## ")] == [
        *("## Compared with other methods", "## Others", "## Tiles", "## Planning time")
    ]


def test_compiled_kernels_are_told_beside_inductor(tmp_path: Path) -> None:
    ways = {
        "eager": (300, 1.0),
        "inductor, no budget": (280, 0.9),
        "stowplan, 3 kernels compiled, at 270.00 MiB": (270, 0.909),
        "stowplan at 150.00 MiB (half of the activations)": (150, 0.97),
    }
    study = Study("kernels", tmp_path)
    for way, (peak, time) in ways.items():
        study.tell("net", way, "peak", peak * 2**20, "B")
        study.tell("net", way, "time", time, "of eager", (time, time))
    text = " ".join(markdown_of(read_results(tmp_path))[0].split())
    assert "net: the fastest plan takes 1.010 of inductor's without a budget" in text
    assert "with half of the activations 0.970 of eager's" in text
    assert "there is no plan with a quarter of the activations" in text
    assert "net, inductor, no budget: within 280 MiB 0.900 of eager, stowplan 0.909" in text


@pytest.mark.parametrize(
    ("peak", "told_so"), [(1000, ""), (900, "projected"), (1001, "allowed"), (995, "")], ids=str
)
def test_a_peak_that_breaks_its_budget_or_projection_is_a_fault(peak: int, told_so: str) -> None:
    def loss() -> Tensor:
        raise AssertionError("nothing is run")

    method = Method("plan", loss, allowed_bytes=1000, projected_bytes=1000, peak_bytes=peak)
    assert told_so in method.fault
    assert bool(method.fault) is bool(told_so)


def test_the_last_run_of_a_case_counts(tmp_path: Path) -> None:
    before = told(tmp_path, 1.3)
    lines = (tmp_path / "peers.jsonl").read_text()
    again = lines.replace(before[0].when, "2001-01-01T00:00:00+00:00").splitlines()[:2]
    (tmp_path / "peers.jsonl").write_text(lines + "\n".join(again) + "\n")
    peers = [result for result in read_results(tmp_path) if result.study == "peers"]
    assert [result.way for result in peers] == ["eager", "eager"]


def test_times_are_told_by_round() -> None:
    """A machine that is slow in one round is slow for both."""
    assert ratio_of([2.0, 20.0, 2.0, 2.0], [1.0, 10.0, 1.0, 1.0]) == (2.0, (2.0, 2.0))


def test_ratios_do_not_depend_on_a_host_that_slows_down() -> None:
    clock = count(10)  # the seconds of a method that takes as long as eager
    ratios = ratios_in_round((1.0, 0.5, 2.0, 1.5, 3.0), lambda ratio: ratio * next(clock))
    assert ratios == pytest.approx([1.0, 0.5, 2.0, 1.5, 3.0])


def test_a_suite_runs_all_commands_of_the_summary() -> None:
    """What is claimed is what `make bench` measures."""
    commands = re.findall(r"`python -m benchmarks\.([^`]*)`", SUMMARY)
    assert commands
    assert set(commands) <= set(SUITES["long"])


def test_two_files_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, time, memory in (("old", 1.0, 1000), ("new", 1.3, 1010)):
        study = Study("peers", tmp_path / name)
        study.tell("net", "stowplan", "time", time, "of eager")
        study.tell("net", "stowplan", "peak", memory, "B")
        study.tell("net", name, "peak", 1, "B")
    files = [str(tmp_path / name / "peers.jsonl") for name in ("old", "new")]
    assert compare.main(files) == 0
    shown = capsys.readouterr().out
    assert re.search(r"net +stowplan +time +1 of eager +1\.3 of eager +\+30\.0%", shown)
    assert "1,010" not in shown
    assert "1 of 2 figures changed by more than 5%" in shown
    assert "only in old: peers, net, old, peak\nonly in new: peers, net, new, peak\n" in shown
    assert compare.main([*files, "--share", "0.005"]) == 0
    assert "+1.0%" in capsys.readouterr().out


def test_a_change_from_nothing_is_the_largest() -> None:
    assert compare.change(0, 0) == 0
    assert compare.change(2, 3) == 0.5
    assert compare.change(0, 1) == float("inf")
    assert compare.change(0, -1) == float("-inf")


README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
SUMMARY = PAGE.partition("## In short\n")[2].partition("\n## ")[0]
FIGURES = read_results(ROOT / "docs" / "benchmarks.jsonl")
ROWS = re.findall(
    r"^\| (.*) \| (.*) \| (.*) \| (.*) \| .* \| `(python -m benchmarks.*)` \|$", SUMMARY, re.MULTILINE
)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_the_figures_of_a_row_are_those_of_its_command(row: tuple[str, ...]) -> None:
    _, *cells, command = row
    found = [each for each in FIGURES if each.command.startswith(command)]
    peaks = {peak for each in found if each.unit == "B" for peak in _peaks(each.value)}
    times = {
        f"{time:.2f}" for each in found if each.unit != "B" for time in (each.value, *(each.spread or ()))
    }
    shown = " ".join(cell for cell in cells if "projected" not in cell)
    assert set(re.findall(r"[\d,.]+ [MG]iB", shown)) <= peaks
    assert set(re.findall(r"\b\d\.\d\d\b(?! [MG]iB)", shown)) <= times


def test_the_figures_beside_peers_are_on_the_page_of_benchmarks() -> None:
    text = " ".join(SUMMARY.split())
    pairs = {(time, peak) for peak, time in re.findall(r"([\d,]+ MiB) and (\d\.\d\d)", text)}
    pairs.update(re.findall(r"(\d\.\d\d) in ([\d,]+ MiB)", text))
    by_way = defaultdict[tuple[str, str, str], dict[str, float]](dict)
    for each in FIGURES:
        by_way[each.study, each.case, each.way][each.figure] = each.value
    measured = {
        (f"{found['time']:.2f}", peak)
        for found in by_way.values()
        if found.keys() >= {"time", "peak"}
        for peak in _peaks(found["peak"])
    }
    assert len(pairs) > 20
    assert pairs <= measured


def test_the_page_is_made_of_the_figures_and_of_what_people_wrote() -> None:
    text, _ = markdown_of(FIGURES)
    assert with_others(text, PAGE) == PAGE
    titles = [line.removeprefix("## ") for line in PAGE.splitlines() if line.startswith("## ")]
    by_hand = [title for title in titles if f"\n## {title}\n" not in text]
    assert by_hand == ["In short", "Waiting for a plan"]


def test_the_figures_of_the_readme_are_rows_of_the_summary() -> None:
    """Each of its two figures has the row's bytes, time and quartiles."""
    section = README.partition("## What it costs\n")[2].partition("\n## ")[0]
    claims = [" ".join(claim.split()) for claim in re.findall(r"^- (.*?)(?=^- |^$)", section, re.M | re.S)]
    assert len(claims) == 2
    for claim in claims:
        name = claim.partition(",")[0]
        rows = [" ".join(row) for row in ROWS if row[0].startswith(name)]
        figures = re.findall(r"[\d,.]+ MiB|\d\.\d\d", claim)
        assert len(figures) == 5, claim
        assert any(all(figure in row for figure in figures) for row in rows), claim


def test_the_figures_of_the_questions_are_on_the_page() -> None:
    """The wait and the errors of predictions, which are told a second time there."""
    questions = " ".join((ROOT / "docs" / "questions.md").read_text(encoding="utf-8").split())
    waits = re.findall(r"\| (\d[\d. and]*) \|", questions)
    assert len(waits) == 5
    assert all(f"| {wait} |" in PAGE for wait in waits)
    probed = [each for each in FIGURES if each.study == "projection" and each.way == "probe"]
    worst = max(abs(each.value) for each in probed if each.figure == "peak error")
    plans = [each for each in FIGURES if each.figure == "projected peak" and each.unit == "of measured"]
    eager_kernels = max(abs(each.value) for each in plans if "compiled" not in each.way)
    times = [each.value for each in probed if each.figure == "time error"]
    real = [each.value for each in probed if each.figure == "time error" and each.case.endswith(", real")]
    assert f"by {worst * 100:.2f} % at most for eager steps" in questions
    assert f"by {max(abs(each.value) for each in plans) * 100:.2f} % for plans" in questions
    assert eager_kernels < 0.001
    assert f"{-min(real):.0%} below to {max(real):.0%} above".replace("%", " %") in questions
    assert f"up to {-min(times):.0%} below".replace("%", " %") in questions


def _peaks(nbytes: float) -> set[str]:
    """As people may write it."""
    return {f"{nbytes / 2**20:,.0f} MiB", *(f"{nbytes / 2**30:.{digits}f} GiB" for digits in (1, 2))}
