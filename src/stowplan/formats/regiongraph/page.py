"""A page as tokens: the fields, edge labels and words of each line, from left to right.

One line of the page can cut through several boxes, so a line says nothing about which box a token belongs to.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from stowplan.errors import BadInput


@dataclass(frozen=True, slots=True)
class Field:
    """`key=` with its value as read: one list of numbers for a dim, two for a rect, none for None."""

    line: int
    key: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Label:
    """The text at an edge's arrow: `->input` or `output->`."""

    line: int
    port: str


@dataclass(frozen=True, slots=True)
class Words:
    """What stands between fields, labels and the outlines of ellipses: names, whole or torn, and debris."""

    line: int
    words: tuple[str, ...]


Token: TypeAlias = Field | Label | Words

_BLANK = r"[_ ]{0,2}"
_ARRAY = r"array\(\[([^\]\[]*)\],\s*dtype=int32\)"
_FIELD = re.compile(
    rf"\b(read|write){_BLANK}rect\s*=\s*(?:None|Rect\({_ARRAY},\s*{_ARRAY}\))"
    rf"|\bdist{_BLANK}(input|filters|result)\s*=\s*Rect\({_ARRAY},\s*{_ARRAY}\)"
    rf"|\b(?:(result){_BLANK}dim|d?im)\s*=\s*(?:\[([^\]\[<]*)\]|([0-9OoQlI|]+\b))"
)
_UNFINISHED = re.compile(r"Rect\(|(?:rect|dist_\w+)\s*=")
_ELLIPSE = re.compile(r"<?:{3,}>?")
_LABEL = re.compile(r"\S{0,3}?[-=]?>([A-Za-z0-9.]+)|([A-Za-z0-9._]+)[-=]>")


def tokens_of(text: str) -> Iterator[Token]:
    """The tokens of a page in reading order."""
    for number, line in enumerate(text.split("\n"), start=1):
        end = 0
        for match in _FIELD.finditer(line):
            yield from _between(number, line[end : match.start()])
            yield _field(number, match)
            end = match.end()
        yield from _between(number, line[end:])


def _field(line: int, match: re.Match[str]) -> Field:
    access, low, high, part, part_low, part_high, result, dims, scalar = match.groups()
    if access:
        return Field(line, f"{access}_rect", () if low is None else (low, high))
    if part:
        return Field(line, f"dist_{part}", (part_low, part_high))
    return Field(line, "result_dim" if result else "dim", (scalar if dims is None else dims,))


def _between(line: int, text: str) -> Iterator[Token]:
    if not text or text.isspace():
        return
    if _UNFINISHED.search(text):
        raise BadInput(f"a rect that does not end: {text.strip()[:60]!r}", where=f"line {line}")
    for piece in _ELLIPSE.split(text):
        run: list[str] = []
        for word in piece.split():
            label = _LABEL.fullmatch(word)
            if label is None:
                run.append(word)
                continue
            yield from _words(line, run)
            yield Label(line, label[1] or label[2])
            run = []
        yield from _words(line, run)


def _words(line: int, run: list[str]) -> Iterator[Words]:
    if run:
        yield Words(line, tuple(run))
