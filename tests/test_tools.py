"""What maintainers run: the reference names everything public, a release dates its news, mutants are real."""

import ast
import ctypes
import inspect
import platform
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import stowplan
from benchmarks.mutate import SUBJECTS, mutants_of
from stowplan import errors
from stowplan.cli.main import VERBS, main
from tests.support.timing import timed
from tools.compatibility.__main__ import COLUMNS, PAGE, Row, page_of, read_rows
from tools.compatibility.cuda_stubs import make_stubs
from tools.reference import reference
from tools.release import KINDS, fragments, news, with_date, with_news

SOURCE = Path(stowplan.__file__).parent
ROOT = Path(__file__).parents[1]


@pytest.mark.torch
def test_the_reference_has_every_name_and_verb() -> None:
    page = reference()
    for name in set(stowplan.__all__) - {"__version__"}:
        assert re.search(rf"^\.\. auto\w+:: stowplan\.(errors\.)?{name}$", page, re.MULTILINE), name
    for verb in VERBS:
        assert f"### stowplan {verb}\n" in page
        assert f"usage: stowplan {verb}" in page


def test_every_error_can_be_imported_from_the_top() -> None:
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, errors.StowplanError):
            assert getattr(stowplan, name) is kind


@pytest.mark.torch
def test_the_page_of_versions_shows_the_last_results_from_the_oldest_to_the_newest() -> None:
    from stowplan.torch_private import NEWEST_TESTED, OLDEST

    rows = read_rows()
    tried = {tuple(map(int, row["torch"].split(".")[:2])) for row in rows}
    assert (min(tried), max(tried)) == (OLDEST, NEWEST_TESTED)
    assert PAGE.read_text(encoding="utf-8") == page_of(rows)


def test_the_page_of_versions_names_what_fails() -> None:
    faults = {**dict.fromkeys(COLUMNS[1:], ""), "tiles": "KeyError: 'x'"}
    page = page_of([Row(torch="2.9.1", python="3.12.1", date="2026-01-02", faults=faults)])
    assert "| 2.9.1 | 3.12.1 | not tried | yes | yes | no | yes | yes | yes | yes | 2026-01-02 |" in page
    assert "- tiles on PyTorch 2.9.1 with Python 3.12.1: `KeyError: 'x'`" in page


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not (shutil.which("gcc") and shutil.which("objdump")),
    reason="needs gcc and objdump on x86-64",
)
def test_empty_cuda_libraries_return_an_error_and_its_text(tmp_path: Path) -> None:
    library = tmp_path / "lib" / "libasks.so"
    library.parent.mkdir()
    code = tmp_path / "asks.c"
    code.write_text(
        "int cudaFree(void*); const char* cudaGetErrorString(int);\n"
        "const char* text(void) { return cudaGetErrorString(cudaFree(0)); }\n"
        "int number(void) { return cudaFree(0); }\n"
    )
    absent = tmp_path / "libcudaabsent.so.1"
    build = ["gcc", "-shared", "-fPIC", "-nostdlib"]
    subprocess.run([*build, "-xc", "/dev/null", f"-Wl,-soname,{absent.name}", "-o", absent], check=True)
    asking = [str(code), "-Wl,-rpath,$ORIGIN,--no-as-needed", f"-L{tmp_path}", f"-l:{absent.name}"]
    subprocess.run([*build, *asking, "-o", library], check=True)
    assert make_stubs(tmp_path) == [absent.name]
    asked = ctypes.CDLL(str(library))
    asked.text.restype = ctypes.c_char_p
    assert (asked.number(), asked.text()) == (100, b"no CUDA device")


def test_a_release_dates_its_news() -> None:
    dated = with_date("# Changelog\n\n## Unreleased\n\n- New.\n", "1.2.3")
    assert dated.index("## Unreleased") < dated.index("## 1.2.3 - 20") < dated.index("- New.")
    with pytest.raises(SystemExit, match="nothing under"):
        with_date(dated, "1.2.4")
    with pytest.raises(SystemExit, match="nothing under"):
        with_date("# Changelog\n", "1.2.4")


def test_a_release_joins_fragments_with_what_is_unreleased() -> None:
    head, old, tail = (
        "# Changelog\n\n## Unreleased\n\n",
        "- Old.\n\nOn a card:\n\n- That.\n",
        "\n## 0.1.0\n\n- First.\n",
    )
    changelog = f"{head}### Fixed\n\n{old}{tail}"
    joined = with_news(changelog, "### Fixed\n\n- New,\n  in two lines.\n\n### Breaking\n\n- Gone.\n\n\n")
    assert joined == f"{head}### Breaking\n\n- Gone.\n\n### Fixed\n\n- New,\n  in two lines.\n{old}{tail}"
    assert with_news(changelog, "") == changelog
    with pytest.raises(SystemExit, match="more than the sections"):
        with_news(changelog, "### Removed\n\n- That.\n")


def test_a_fragment_is_named_by_its_kind_and_short() -> None:
    for fragment in fragments():
        assert re.fullmatch(rf"\d+-[a-z0-9-]+\.({'|'.join(KINDS).lower()})\.md", fragment.name), fragment.name
        text = fragment.read_text(encoding="utf-8")
        assert text.rstrip().endswith((".", ")")), f"{fragment.name} is no sentence"
        assert not re.search(r"^(#|- )", text, re.MULTILINE), f"{fragment.name}: no heading, no list"
        assert len(text.split()) <= 120, fragment.name
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (ROOT / target).exists(), f"{fragment.name}: {target}, from where the changelog is"


def test_fragments_become_sections_of_the_changelog() -> None:
    pytest.importorskip("towncrier")
    told = news("9.9.9")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    joined = with_news(changelog, told)
    for fragment in fragments():
        assert " ".join(fragment.read_text(encoding="utf-8").split()) in " ".join(joined.split()), (
            fragment.name
        )
    kept = [line for line in joined.splitlines() if line.strip()]
    assert all(line in kept for line in changelog.splitlines() if line.strip())


def test_the_version_is_told_everywhere_alike(capsys: pytest.CaptureFixture[str]) -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"stowplan {built}\n"
    released = re.search(r"^## (\d\S*) - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released is None or released[1] == built


def test_mutants_are_programs_that_differ() -> None:
    source = "def f(a, b):\n  'Doc.'\n  a += 1\n  if a and b:\n    a -= 1\n  return a + 2 if b < 3 else 0\n"
    found = list(mutants_of("f.py", source))
    assert {mutant.what for mutant in found} == {
        *("comparison turned", "operator flipped", "condition negated"),
        *("constant plus one", "statement left out", "body left out", "and for or"),
    }
    plain = ast.unparse(ast.parse(source))
    assert len({mutant.source for mutant in found}) == len(found)
    assert all(mutant.source != plain and ast.parse(mutant.source) for mutant in found)


def test_what_is_mutated_exists() -> None:
    for subject in SUBJECTS:
        assert all(any(SOURCE.glob(files)) for files in subject.files)
        assert all((ROOT / test).exists() for test in subject.tests)


@pytest.mark.parametrize(("passes_at", "tries"), [(1, 1), (3, 3)])
def test_a_test_of_seconds_gets_three_tries(passes_at: int, tries: int) -> None:
    calls: list[None] = []

    @timed
    def compare() -> None:
        calls.append(None)
        assert len(calls) == passes_at

    compare()
    assert len(calls) == tries


def test_a_test_of_seconds_fails_at_last() -> None:
    calls: list[None] = []

    @timed
    def compare() -> None:
        calls.append(None)
        raise AssertionError("slow")

    with pytest.raises(AssertionError, match="slow"):
        compare()
    assert len(calls) == 3
