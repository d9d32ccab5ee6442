"""The script of the page: linted, and its arithmetic agrees with that of the command line."""

import shutil
import subprocess
from pathlib import Path

import pytest

import stowplan.report
from stowplan.ir import Document, Graph
from stowplan.report.page import subject_of
from stowplan.units import format_bytes, format_seconds
from tests.support.pages import browser, written

ASSETS = Path(stowplan.report.__file__).parent / "assets"


def test_the_script_is_clean() -> None:
    linter = shutil.which("oxlint")
    if linter is None:
        pytest.skip("no oxlint: pip install oxlint")
    done = subprocess.run([linter, str(ASSETS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_every_script_is_loaded_by_the_page() -> None:
    page = written(subject_of(Document("graph", Graph({}, ())), "empty")).read_text()
    for script in ASSETS.glob("*.js"):
        assert script.read_text(encoding="utf-8").strip() in page


@pytest.mark.browser
def test_an_empty_graph_is_shown_as_such() -> None:
    with browser().page(written(subject_of(Document("graph", Graph({}, ())), "empty"))) as page:
        assert "Nothing runs" in page.run("document.body.innerText")
        assert page.errors == []


@pytest.mark.browser
def test_figures_are_written_as_on_the_command_line() -> None:
    sizes = [0, 1, 812, 1023, 1024, 1536, 96_337_920, 7_938_850_064, 2**50]
    times = [0, 3e-9, 4.2e-6, 0.0228, 1.24, 59.0]
    with browser().page(written(subject_of(Document("graph", Graph({}, ())), "empty"))) as page:
        assert page.run(f"{sizes}.map(stow.text.bytes)") == [*map(format_bytes, sizes[:-1]), "1.00 PiB"]
        assert page.run(f"{times}.map(stow.text.seconds)") == [*map(format_seconds, times)]


@pytest.mark.browser
def test_long_names_are_cut_in_the_middle() -> None:
    with browser().page(written(subject_of(Document("graph", Graph({}, ())), "empty"))) as page:
        assert page.run("stow.text.shortened('abcdefghij', 5)") == "ab\u2026ij"
        assert page.run("stow.text.shortened('abc', 5)") == "abc"
        assert page.run("Array.from(stow.text.shortened('\\u{1f600}'.repeat(9), 4)).length") == 4


@pytest.mark.browser
def test_paths_of_modules_keep_their_numbers_and_their_end() -> None:
    with browser().page(written(subject_of(Document("graph", Graph({}, ())), "empty"))) as page:
        path = "'network.blocks.11.feed_forward.2.weight'"
        assert page.run(f"stow.text.abbreviated({path}, 40)") == "network.blocks.11.feed_forward.2.weight"
        assert page.run(f"stow.text.abbreviated({path}, 30)") == "n.b.11.feed_forward.2.weight"
        assert page.run(f"stow.text.abbreviated({path}, 20)") == "n.b.11.f.2.weight"
        assert len(page.run(f"stow.text.abbreviated({path}, 10)")) == 10
