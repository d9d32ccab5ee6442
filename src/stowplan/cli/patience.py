"""Progress on a terminal: the current work, how far it is, and the time it may take.

Nothing is printed in the first two seconds, nor into pipes and files. One line of standard error is
overwritten and finally cleared; it has no colours.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from shutil import get_terminal_size
from threading import Event, Thread
from time import monotonic
from typing import TextIO

from stowplan.plan.watch import Searching, watched_by
from stowplan.units import format_bytes, printable

_SILENT = 2.0  # seconds
_EVERY = 0.25  # seconds from one look to the next
_EARLY = 0.02  # share of the work below which the rest is not estimated


class Waiting:
    """The current work and its progress. The worker reports it, a thread shows it."""

    def __init__(self, doing: str, allowed_bytes: int | None = None) -> None:
        self._doing = printable(doing).replace("\n", " ")
        self._allowed_bytes = allowed_bytes
        self._begun = self._stage_begun = monotonic()
        self._stage, self._share, self._far, self._found = "", 0.0, "", ""

    def tried(self, done: int, of: int) -> None:
        """`done` of `of` ops have been probed."""
        self._enter("probing ops", done / max(1, of))
        self._far, self._found = f" {done:,} of {of:,}", ""

    def searched(self, searching: Searching) -> None:
        """A search has made progress; there may be several."""
        self._enter("searching", searching.share)
        self._far, self._found = f" {searching.share:.0%}", self._best(searching)

    def line(self, width: int) -> str:
        """The whole line; the description of the work is shortened first."""
        now = monotonic()
        spent = now - self._stage_begun
        early = self._share <= _EARLY
        time = f"{now - self._begun:.0f} s" if early else f"about {_told(spent / self._share - spent)} left"
        parts = (f"{self._stage}{self._far}", time, self._found)
        rest = ", ".join(part for part in parts if part)
        return f"{_shortened(self._doing, width - len(rest) - 2)}: {rest}"[:width]

    def _enter(self, stage: str, share: float) -> None:
        if stage != self._stage or share < self._share:
            self._stage, self._stage_begun = stage, monotonic()
        self._share = share

    def _best(self, searching: Searching) -> str:
        if self._allowed_bytes is None:
            return f"down to {format_bytes(int(min(peak for peak, _ in searching.points)))}"
        ratio = searching.ratio_within(self._allowed_bytes)
        gap = searching.gap_within(self._allowed_bytes)
        return "nothing fits yet" if ratio is None else f"best {ratio:.3f} x baseline, gap {gap:.1%}"


def _shortened(text: str, width: int) -> str:
    """Both ends of a text that is too long."""
    head = max(0, (width - 3) // 2)
    return text if len(text) <= width else f"{text[:head]}...{text[len(text) - head :]}"


def _told(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


@contextmanager
def a_word_after_two_seconds(
    doing: str, *, allowed_bytes: int | None = None, stream: TextIO | None = None, silent: float = _SILENT
) -> Iterator[Waiting]:
    """Show on a terminal what takes long; the worker reports progress to the yielded object.

    `allowed_bytes` is the budget whose best plan so far is shown during the search.
    """
    waiting, screen = Waiting(doing, allowed_bytes), stream or sys.stderr
    done = Event()
    teller = Thread(target=_tell, args=(waiting, screen, done, silent), daemon=True)
    if screen.isatty():
        teller.start()
    try:
        with watched_by(waiting.searched):
            yield waiting
    finally:
        done.set()
        if teller.ident is not None:
            teller.join()


def _tell(waiting: Waiting, screen: TextIO, done: Event, silent: float) -> None:
    """Print the line until the work is done, then clear it."""
    width, pause = 0, silent
    while not done.wait(pause):
        line = waiting.line(get_terminal_size().columns - 1)
        width, pause = max(width, len(line)), _EVERY
        print(line.ljust(width), end="\r", file=screen, flush=True)
    if width:
        print(" " * width, end="\r", file=screen, flush=True)
