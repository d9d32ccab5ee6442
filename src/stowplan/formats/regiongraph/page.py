"""A page as tokens: the fields, edge labels and words of each line, from left to right; and remarks on it.

One line of the page can cut through several boxes, so a line does not tell which box a token belongs to.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from stowplan.errors import BadInput
from stowplan.formats.regiongraph.spelling import LARGEST, numbers_of
from stowplan.geometry import Point, Rect
from stowplan.ir import Note, NoteKind


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


_MOST_DIMS = 32  # of a numpy array


def dims_text(sizes: Iterable[object]) -> str:
    """`[1 64 32]`."""
    return f"[{' '.join(map(str, sizes))}]"


def rect_text(rect: Rect | None) -> str:
    """`Rect(array([lo..], dtype=int32), array([hi..], dtype=int32))`, or `None`."""
    if rect is None:
        return "None"
    lo, hi = (f"array([{', '.join(map(str, bounds))}], dtype=int32)" for bounds in (rect.lo, rect.hi))
    return f"Rect({lo}, {hi})"


def bounds_of(token: Field) -> tuple[Point, ...]:
    """The lists of a field, as far as they can be read: low and high bounds of a rect, none for None."""
    return tuple(_bounds(part, token.line) for part in token.parts)


def rect_of(token: Field) -> Rect | None:
    """The rect of a field that is whole."""
    bounds = bounds_of(token)
    if not bounds:
        return None
    lo, hi = bounds
    if len(lo) != len(hi):
        message = f"{token.key} has {len(lo)} low and {len(hi)} high bounds"
        raise BadInput(message, where=f"line {token.line}")
    return Rect(lo, hi)


def _bounds(text: str, line: int) -> Point:
    bounds = numbers_of(text)
    if len(bounds) > _MOST_DIMS:
        raise BadInput(f"{len(bounds)} dims, of at most {_MOST_DIMS}", where=f"line {line}")
    for bound in bounds:
        if abs(bound) > LARGEST:
            raise BadInput(f"a bound of {bound.bit_length()} bits does not fit int32", where=f"line {line}")
    return bounds


@dataclass(slots=True)
class Remarks:
    """Notes in the making, by line."""

    _notes: list[tuple[int, Note]] = field(default_factory=list)

    def repaired(self, line: int, what: str, read: str, became: str, why: str = "") -> None:
        """`what` was read as one thing and taken for another."""
        message = f"{what}: read {read!r}, became {became!r}" + (f" {why}" if why else "")
        self._add(NoteKind.REPAIRED, line, message)

    def inferred(self, line: int, what: str) -> None:
        """Not on the page, deduced."""
        self._add(NoteKind.INFERRED, line, what)

    def odd(self, line: int, what: str) -> None:
        """Strange, and kept or left aside."""
        self._add(NoteKind.ODD, line, what)

    def in_order(self) -> tuple[Note, ...]:
        """The notes from the top of the page to its end."""
        return tuple(note for _, note in sorted(self._notes, key=lambda entry: entry[0]))

    def _add(self, kind: NoteKind, line: int, what: str) -> None:
        self._notes.append((line, Note(kind, f"line {line}", what)))
