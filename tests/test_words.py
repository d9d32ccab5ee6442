"""The words of docs/glossary.md are kept: no retired word stands in a page, an example or a help text."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from stowplan.cli.main import VERBS, main

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
PLACES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "examples")
"""Files and folders that are searched; of a folder, all Markdown and Python files in it."""
SUFFIXES = (".md", ".py")
NOT_YET = re.compile(r"CHANGELOG|benchmarks|adding-an|decisions|design|report|shards")
"""Texts that are still to be rewritten."""

_ROW = re.compile(r"^\| (?P<word>[^|]+) \| (?P<meaning>[^|]+) \|(?P<retired>[^|]*)\|$", re.MULTILINE)


class Found(NamedTuple):
    """A retired word in a text."""

    line: int
    word: str


def retired_words(glossary: str) -> tuple[str, ...]:
    """What stands in backticks in the third column of the glossary's tables."""
    return tuple(word for row in _ROW.finditer(glossary) for word in re.findall(r"`([^`]+)`", row["retired"]))


def pattern_of(word: str) -> re.Pattern[str]:
    """Whole words only, also over a line's end; by case if there is a capital letter in it."""
    spelled = r"[\s#]+".join(map(re.escape, word.split()))
    return re.compile(rf"\b{spelled}\b", 0 if word != word.lower() else re.IGNORECASE)


def found_in(text: str, words: tuple[str, ...]) -> Iterator[Found]:
    for word in words:
        for match in pattern_of(word).finditer(text):
            yield Found(text.count("\n", 0, match.start()) + 1, word)


def texts() -> Iterator[Path]:
    for place in map(ROOT.joinpath, PLACES):
        files = sorted(place.rglob("*")) if place.is_dir() else [place]
        yield from (
            file
            for file in files
            if file.suffix in SUFFIXES
            and file != GLOSSARY
            and not NOT_YET.search(str(file.relative_to(ROOT)))
        )


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


def test_a_new_row_is_enforced() -> None:
    """The check itself: whole words, over line ends, by case where there is a capital."""
    row = '| word | meaning | retired |\n|---|---|---|\n| keep | It stays. | `hang on`, `Way`, "old" |\n'
    words = retired_words(row)
    assert words == ("hang on", "Way")
    text = "Old ways.\nTensors hang\n# on here.\nA Way out, a way in, a Wayside inn, hang only."
    assert set(found_in(text, words)) == {Found(2, "hang on"), Found(4, "Way")}
