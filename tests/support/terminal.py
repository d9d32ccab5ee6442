"""Programs in a real pseudo-terminal: what they write, when, and what is then on the screen."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import monotonic
from unicodedata import east_asian_width

_ROWS, _TAB = 50, 8
_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b.|.", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Written:
    """What a program wrote at once, and the second since its start."""

    second: float
    text: str


@dataclass(frozen=True, slots=True)
class Run:
    """A program that has ended."""

    code: int
    written: Sequence[Written]

    @property
    def text(self) -> str:
        """All that it wrote."""
        return "".join(part.text for part in self.written)

    def seconds_of(self, pattern: str) -> list[float]:
        """When text of this pattern was written."""
        return [part.second for part in self.written if re.search(pattern, part.text)]


def longest_pause(seconds: Sequence[float]) -> float:
    """The most seconds between two of these."""
    return max(after - before for before, after in pairwise(seconds))


def run_in_terminal(
    argv: Sequence[str], *, columns: int, folder: Path, environment: Mapping[str, str]
) -> Run:
    """Run a program whose standard streams are a terminal of so many columns."""
    inner, outer = pty.openpty()
    fcntl.ioctl(outer, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, columns, 0, 0))
    begun = monotonic()
    with subprocess.Popen(
        argv,
        stdin=outer,
        stdout=outer,
        stderr=outer,
        cwd=folder,
        env=dict(environment),
        start_new_session=True,
    ) as process:
        os.close(outer)
        written = [Written(monotonic() - begun, text) for text in _texts(inner)]
    os.close(inner)
    return Run(process.returncode, written)


def _texts(terminal: int) -> Iterator[str]:
    """What arrives, until the last program has closed the terminal."""
    rest = b""
    while True:
        try:
            read = os.read(terminal, 1 << 16)
        except OSError:  # how Linux says it
            return
        if not read:
            return
        rest += read
        whole = rest.decode(errors="ignore")
        if not rest.endswith(whole[-1:].encode()):  # in the middle of a character
            continue
        rest = b""
        yield whole


@dataclass(slots=True)
class Screen:
    """A terminal's picture of what was written: enough of one for lines, colours and overwriting."""

    columns: int
    lines: list[list[str]] = field(default_factory=lambda: [[]])
    row: int = 0
    column: int = 0

    @classmethod
    def after(cls, run: Run, columns: int) -> "Screen":
        """The screen when a program has ended."""
        screen = cls(columns)
        for match in _TOKEN.finditer(run.text):
            screen._take(match)
        return screen

    def shown(self) -> list[str]:
        """The lines, without blanks at their ends."""
        return ["".join(line).rstrip() for line in self.lines]

    def _take(self, match: re.Match[str]) -> None:
        text = match[0]
        if match[2] == "m":
            return
        if match[2] == "K" and match[1] in ("", "0"):
            del self.lines[self.row][self.column :]
        elif text == "\r":
            self.column = 0
        elif text == "\n":
            self._begin_line()
        elif text == "\t":
            self.column += _TAB - self.column % _TAB
        elif text.isprintable():
            self._put(text)
        else:
            raise AssertionError(f"this screen does not know {text!r}")

    def _begin_line(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append([])

    def _put(self, char: str) -> None:
        width = 2 if east_asian_width(char) in "WF" else 1
        if self.column + width > self.columns:
            self._begin_line()
            self.column = 0
        line = self.lines[self.row]
        line.extend(" " * (self.column + width - len(line)))
        line[self.column : self.column + width] = [char, *[""] * (width - 1)]
        self.column += width
