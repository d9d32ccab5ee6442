"""Scanner: one line of the text form, read word by word, with faults that say where they are."""

import json
import re
from enum import StrEnum
from typing import TypeVar

from stowplan.errors import BadInput

BARE_WORD = re.compile(r"[\w./$%@~+-]+(?::+[\w./$%@~+-]+)*", re.ASCII)
_WORD = re.compile(rf'"(?:[^"\\]|\\.)*"|{BARE_WORD.pattern}', re.ASCII)
_INTEGER = re.compile(r"-?[0-9]{1,40}")
_SPACE = re.compile(r"[ \t\r]*")

_Choice = TypeVar("_Choice", bound=StrEnum)


class Scanner:
    """A place in a line. Every method skips blanks, then takes what it names or refuses."""

    __slots__ = ("_line", "_number", "_position")

    def __init__(self, line: str, number: int) -> None:
        self._line, self._number, self._position = line, number, 0

    def fault(self, what: str) -> BadInput:
        """What is wrong with this line, to be raised."""
        return BadInput(what, where=f"line {self._number}")

    def word(self, what: str) -> str:
        """The next word, without its quotes; `what` tells the reader which word is missing."""
        self._skip_blanks()
        match = _WORD.match(self._line, self._position)
        if match is None:
            raise self.fault(f"expected {what} {self._here()}")
        self._position = match.end()
        return self._unquoted(match[0]) if match[0].startswith('"') else match[0]

    def integer(self, what: str) -> int:
        """The next word, which must be a whole number."""
        word = self.word(what)
        if not _INTEGER.fullmatch(word):
            raise self.fault(f"expected {what}, found {_shortened(word)}")
        return int(word)

    def choice(self, choices: type[_Choice], word: str) -> _Choice:
        """`word` as a member of a closed list."""
        for member in choices:
            if member == word:
                return member
        raise self.fault(f"{_shortened(word)} is not a {choices.__name__.lower()}: {', '.join(choices)}")

    def take(self, mark: str) -> bool:
        """Whether `mark` comes next; if so, it is behind us."""
        self._skip_blanks()
        found = self._line.startswith(mark, self._position)
        self._position += len(mark) * found
        return found

    def sees(self, *marks: str) -> bool:
        """Whether one of the marks comes next."""
        self._skip_blanks()
        return self._line.startswith(marks, self._position)

    def expect(self, mark: str) -> None:
        """Pass over `mark` or refuse the line."""
        if not self.take(mark):
            raise self.fault(f"expected {mark!r} {self._here()}")

    def at_end(self) -> bool:
        """Whether nothing but blanks is left."""
        self._skip_blanks()
        return self._position == len(self._line)

    def finish(self) -> None:
        """Refuse the line if something is left of it."""
        if not self.at_end():
            raise self.fault(f"expected the end of the line {self._here()}")

    def rest(self) -> str:
        """All that is left of the line."""
        rest, self._position = self._line[self._position :], len(self._line)
        return rest

    def _skip_blanks(self) -> None:
        match = _SPACE.match(self._line, self._position)
        self._position = match.end() if match else self._position

    def _unquoted(self, word: str) -> str:
        try:
            return str(json.loads(word))
        except ValueError as fault:
            raise self.fault(f"{_shortened(word)} is not a quoted word: {fault}") from fault

    def _here(self) -> str:
        rest = self._line[self._position :]
        return f"before {_shortened(rest)}" if rest else "at the end of the line"


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
