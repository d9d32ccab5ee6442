"""The words of docs/glossary.md are kept: the source, pages, examples and help texts use no retired word."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, get_args

import pytest

import stowplan
from stowplan import errors
from stowplan.cli.main import VERBS, main
from stowplan.plan.steps import Decision, Step

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
PLACES = (
    "README.md",
    "CONTRIBUTING.md",
    "SUPPORT.md",
    "CHANGELOG.md",
    "changes",
    "docs",
    "examples",
    "benchmarks",
    "src",
)
"""Files and folders that are searched; of a folder, all files in it that people write."""
SUFFIXES = (".md", ".py", ".js", ".css")
EXCEPTIONS = {
    "stowplan::fence": "the type of an op, which graphs in plan files name",
    "plain_peak_bytes": "a field of Plan, and a key of plan files",
    '"made_again"': "a key of `explain --json`",
    "runs_again": "a key of `compare --json`",
}
"""Texts that may hold a retired word, with the reason."""

_ROW = re.compile(r"^\| (?P<word>[^|]+) \| (?P<meaning>[^|]+) \|(?P<retired>[^|]*)\|$", re.MULTILINE)


class Found(NamedTuple):
    """A retired word in a text."""

    line: int
    word: str


def retired_words(glossary: str) -> tuple[str, ...]:
    """What stands in backticks in the third column of the glossary's tables."""
    return tuple(word for row in _ROW.finditer(glossary) for word in re.findall(r"`([^`]+)`", row["retired"]))


def pattern_of(word: str) -> re.Pattern[str]:
    """Whole words only, also over a line's end and inside a name; by case if it has a capital letter."""
    spelled = r"[\s#_]+".join(map(re.escape, word.split()))
    return re.compile(rf"(?<![^\W_]){spelled}(?![^\W_])", 0 if word != word.lower() else re.IGNORECASE)


def found_in(text: str, words: tuple[str, ...]) -> Iterator[Found]:
    for exception in EXCEPTIONS:
        text = text.replace(exception, "")
    lowered = text.lower()
    for word in words:
        if word.split()[0].lower() not in lowered:  # far quicker than the pattern
            continue
        for match in pattern_of(word).finditer(text):
            yield Found(text.count("\n", 0, match.start()) + 1, word)


def texts() -> Iterator[Path]:
    for place in map(ROOT.joinpath, PLACES):
        files = sorted(place.rglob("*")) if place.is_dir() else [place]
        yield from (file for file in files if file.suffix in SUFFIXES and file != GLOSSARY)


WORDS = retired_words(GLOSSARY.read_text(encoding="utf-8"))


def test_the_glossary_retires_words() -> None:
    assert len(WORDS) > 60
    assert {"made again", "MasterPlanner", "so many"} <= set(WORDS)
    assert len(WORDS) == len(set(WORDS))


@pytest.mark.parametrize("path", list(texts()), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_retired_word_in_a_text(path: Path) -> None:
    found = list(found_in(path.read_text(encoding="utf-8"), WORDS))
    assert not found, "\n".join(
        f"{path.relative_to(ROOT)}:{line}: {word!r} is retired" for line, word in found
    )


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_no_retired_word_in_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*verb.split(), "--help"])
    found = [word for _, word in found_in(capsys.readouterr().out, WORDS)]
    assert not found


@pytest.mark.torch
def test_no_retired_word_in_the_reference() -> None:
    """The words of public names and errors, which the site shows."""
    public = [getattr(stowplan, name) for name in stowplan.__all__ if name != "__version__"]
    public += [kind for kind in vars(errors).values() if inspect.isclass(kind)]
    found = {thing: list(found_in(inspect.getdoc(thing) or "", WORDS)) for thing in public}
    assert not {thing.__name__: words for thing, words in found.items() if words}


def test_a_new_row_is_enforced() -> None:
    """The check itself: whole words, over line ends, by case where there is a capital."""
    row = '| word | meaning | retired |\n|---|---|---|\n| keep | It stays. | `hang on`, `Way`, "old" |\n'
    words = retired_words(row)
    assert words == ("hang on", "Way")
    text = (
        "Old ways.\nTensors hang\n# on here.\nA Way out, a way in, a Wayside inn, hang only.\nhang_on_to = 1"
    )
    assert set(found_in(text, words)) == {Found(2, "hang on"), Found(4, "Way"), Found(5, "hang on")}


DESIGN, GUIDE = ROOT / "docs" / "design.md", ROOT / "CONTRIBUTING.md"
SOURCE = ROOT / "src" / "stowplan"


def test_the_design_names_every_folder() -> None:
    folders = {
        path.parent for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    text = DESIGN.read_text(encoding="utf-8")
    named = {f"{folder.relative_to(SOURCE)}/" for folder in folders - {SOURCE}}
    missing = {folder for folder in named if f"`{folder}`" not in text and f"\n  {folder} " not in text}
    assert not missing


@pytest.mark.parametrize("page", [DESIGN, GUIDE], ids=lambda page: page.stem)
def test_folders_and_modules_that_are_named_exist(page: Path) -> None:
    parts = "|".join(path.name for path in SOURCE.iterdir() if path.is_dir())
    named = re.findall(rf"`((?:{parts})/[\w/]*(?:\.py)?)`", page.read_text(encoding="utf-8"))
    assert len(named) > 20
    assert not [name for name in named if not (SOURCE / name).exists()]


def test_the_design_names_the_decisions_and_steps_of_a_plan() -> None:
    row = re.search(r"^\| `Plan` \| (.*) \|$", DESIGN.read_text(encoding="utf-8"), re.MULTILINE)
    assert row is not None
    decisions, steps = (re.findall(r"`(\w+)`", listed) for listed in re.findall(r"\(([^)]*)\)", row[1]))
    assert decisions == [kind.__name__ for kind in get_args(Decision)]
    assert steps == [kind.__name__ for kind in get_args(Step)]


def test_types_that_the_design_names_exist() -> None:
    named = set(re.findall(r"`([A-Z][a-z]\w*)`", DESIGN.read_text(encoding="utf-8")))
    source = "\n".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    assert "RecomputeOp" in named
    assert not [name for name in named if not re.search(rf"^class {name}\b", source, re.MULTILINE)]


def test_the_design_names_the_verbs_of_the_command_line() -> None:
    listed = re.search(r"The commands are (.*?)\. ", DESIGN.read_text(encoding="utf-8"), re.DOTALL)
    assert listed is not None
    assert re.findall(r"`([\w-]+)`", listed[1]) == list(VERBS)


@pytest.mark.parametrize("page", [DESIGN, GUIDE, ROOT / "README.md"], ids=lambda page: page.stem)
def test_commands_that_are_named_exist(page: Path) -> None:
    named = set(
        re.findall(r"stowplan ([a-z]+(?:-[a-z]+)*) [\w.{}/-]*[:./A-Z]", page.read_text(encoding="utf-8"))
    )
    assert named <= set(VERBS)


def test_the_walk_has_ten_stops_that_lead_through_the_code() -> None:
    walk = GUIDE.read_text(encoding="utf-8").partition("## A walk through `fit`")[2].partition("\n## ")[0]
    stops = re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |\Z)", walk, re.MULTILINE | re.DOTALL)
    assert [number for number, _ in stops] == [str(number) for number in range(1, 11)]
    assert all(re.search(r"`[a-z]+/[\w/]+\.py`", stop) for _, stop in stops)
