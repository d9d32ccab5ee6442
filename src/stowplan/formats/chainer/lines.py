"""A file read line by line: whoever asks for a line says what it should be, and a fault names the line."""

import re

from stowplan.errors import BadInput

_SHOWN = 60


class Lines:
    """A cursor over the lines of a text. `number` is that of the line last read, from 1."""

    def __init__(self, text: str) -> None:
        self._lines = text.split("\n")
        self.number = 0

    def next(self, wanted: str) -> str:
        """The next line; `wanted` describes it for the message if the file ends here."""
        if self.number == len(self._lines) or self.is_at_end():
            self.number = min(self.number + 1, len(self._lines))
            raise self.fault(f"the file ends where {wanted} should be")
        self.number += 1
        return self._lines[self.number - 1].rstrip("\r")

    def match(self, pattern: re.Pattern[str], wanted: str) -> re.Match[str]:
        """The next line, which must be of this form."""
        line = self.next(wanted)
        found = pattern.fullmatch(line)
        if found is None:
            shown = line if len(line) <= _SHOWN else line[:_SHOWN] + "..."
            raise self.fault(f"{shown!r} is not {wanted}")
        return found

    def is_at_end(self) -> bool:
        """Whether only the file's last line break is left."""
        return self.number == len(self._lines) - 1 and not self._lines[-1].strip()

    def fault(self, what: str) -> BadInput:
        """The error to raise about the line last read."""
        return BadInput(what, where=f"line {self.number}")
