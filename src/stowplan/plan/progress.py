"""What a user sees of work that takes long: one line with what runs, how far it is, and the best plan so far.

Nothing is shown in the first two seconds. A terminal then has the line on standard error, several times a
second, and a notebook below the cell; both remove it at the end. Elsewhere the line is logged under
"stowplan" now and then, at level INFO.

A thread draws the line while the user's own code may run. It therefore imports nothing, draws no random
numbers and replaces no stream: it overwrites its line after a carriage return, which every terminal has.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from threading import Event, Lock, RLock, Thread
from time import monotonic, monotonic_ns
from typing import Any, Protocol, TextIO
from unicodedata import combining, east_asian_width

from stowplan.units import format_bytes, printable
from stowplan.watch import PlanningPhase, Searching, watched_by

_LOGGER = logging.getLogger("stowplan")
_SILENT = 2.0  # seconds
_EVERY, _LOG_EVERY = 0.25, 10.0  # seconds from one look to the next
_EARLY = 0.02  # share of the work below which the rest is not estimated
_BAR, _NAME = 10, 16  # columns of the bar; the fewest that the name of the work is shortened to
_COLUMNS, _MOST_COLUMNS = 80, 120  # of a terminal that does not say; of the line
_ANY_WIDTH = sys.maxsize
_NOTHING = "nothing fits yet"


class Waiting:
    """The current work and its progress. The worker reports it, a thread shows it."""

    def __init__(self, doing: str, allowed_bytes: int | None = None) -> None:
        self._doing = printable(doing).replace("\n", " ")
        self._allowed_bytes = allowed_bytes
        self._begun = self._stage_begun = monotonic()
        self._stage, self._far, self._share = "starting", "", 0.0
        self._best, self._gap = "", ""
        self.has_plan = False  # whether a search has met a schedule within the budget
        self.make_room: Callable[[], object] = lambda: None  # clears the line for what is printed next

    def told(self, news: Searching | PlanningPhase) -> None:
        """Work has begun or has made progress; there may be several searches."""
        if isinstance(news, Searching):
            self._enter("searching", news.share)
            self._far = f" {news.share:.0%}"
            self._note_best(news)
        else:
            self._enter(news.name, news.done / news.of if news.of else 0.0)
            self._best = "" if self._best == _NOTHING else self._best
            self._far = (
                f" {news.done:,} of {news.of:,}" if news.of else f" {news.done:,}" if news.done else ""
            )

    @contextmanager
    def within(self, doing: str, allowed_bytes: int | None) -> Iterator[None]:
        """A part of the work, with a name, a budget and a best plan of its own."""
        before = self._doing, self._allowed_bytes
        self._doing = printable(doing).replace("\n", " ")
        self._allowed_bytes = allowed_bytes or self._allowed_bytes
        self._best, self._gap = "", ""
        try:
            yield
        finally:
            self._doing, self._allowed_bytes = before

    def line(self, width: int = _ANY_WIDTH, bar: str = "") -> str:
        """The line in at most `width` columns; `bar` has a character for what is done and one for the rest.

        Where there is little room, the line goes without its bar, then with only the ends of the name of the
        work, then without that name, and at last in fewer words.
        """
        now, share = monotonic(), self._share
        spent, is_early = now - self._stage_begun, share <= _EARLY
        left = f"{now - self._begun:.0f} s" if is_early else f"{_told(spent / share - spent)} left"
        time = left if is_early else f"about {left}"
        stage = f"{self._stage}{self._far}"
        drawn = f"{stage} {_bar(share, bar)}" if bar and not is_early else stage
        rest = _listed(stage, time, self._best, self._gap)
        room = max(_NAME, width - _columns(rest) - 2)
        lines = (
            f"{self._doing}: {_listed(drawn, time, self._best, self._gap)}",
            f"{_shortened(self._doing, room)}: {rest}",
            rest,
            _listed(stage, left, self._best),
            _listed(stage, self._best),
            _listed(stage, left),
        )
        return next((line for line in lines if _columns(line) <= width), _shortened(stage, width))

    def _enter(self, stage: str, share: float) -> None:
        if stage != self._stage or share < self._share:
            self._stage, self._stage_begun = stage, monotonic()
        self._share = share

    def _note_best(self, searching: Searching) -> None:
        """The best schedule of the search, in what matters to the user."""
        if self._allowed_bytes is None:
            self._best = f"down to {format_bytes(int(min(peak for peak, _ in searching.points)))}"
            return
        ratio = searching.ratio_within(self._allowed_bytes)
        gap = searching.gap_within(self._allowed_bytes)
        if ratio is None:
            self._best, self._gap = _NOTHING, ""
            return
        self.has_plan = True
        self._best, self._gap = f"best {ratio:.3f} x baseline", f"gap {gap:.1%}"


def _listed(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _bar(share: float, characters: str) -> str:
    done = round(_BAR * min(1.0, share))
    return characters[0] * done + characters[1] * (_BAR - done)


def _told(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _columns(text: str) -> int:
    """The columns that a terminal needs for it."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text)


def _shortened(text: str, width: int) -> str:
    """Both ends of a text that is too wide."""
    if _columns(text) <= width:
        return text
    head = max(0, width - 3) // 2
    return f"{_beginning(text, head)}...{_beginning(text[::-1], width - 3 - head)[::-1]}"[:width]


def _beginning(text: str, width: int) -> str:
    end = 0
    while end < len(text) and _columns(text[: end + 1]) <= width:
        end += 1
    return text[:end]


class _Screen(Protocol):
    """Where the line is shown; `seconds` pass from one line to the next."""

    seconds: float

    def show(self, waiting: Waiting) -> None:
        """Show the line as it is now, in place of the last."""

    def clear(self) -> None:
        """Remove the line."""


class _Terminal:
    """A line that overwrites itself, with the cursor before it: what others print there overwrites it too."""

    seconds = _EVERY

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._shown, self._clear_until = stream, 0, 0.0
        self._writing = RLock()  # a signal may come while the line is cleared

    def show(self, waiting: Waiting) -> None:
        """Write over the last line. The last column stays free, for some terminals wrap there."""
        with self._writing:
            if monotonic() < self._clear_until:
                return
            encoding = self._stream.encoding or "ascii"
            bar = "━─" if encoding.lower().startswith("utf") else "=-"
            line = waiting.line(min(_MOST_COLUMNS, _width_of(self._stream)) - 1, bar)
            self._write(line.encode(encoding, "replace").decode(encoding))

    def clear(self) -> None:
        """Write blanks over the line."""
        with self._writing:
            if self._shown:
                self._write("")

    def make_room(self) -> None:
        """Clear the line for a moment, in which others print."""
        with suppress(OSError, ValueError), self._writing:
            self.clear()
            self._clear_until = monotonic() + _EVERY

    def _write(self, line: str) -> None:
        columns = _columns(line)
        self._stream.write(f"\r{line}{' ' * (self._shown - columns)}\r")
        self._stream.flush()
        self._shown = columns


def _width_of(stream: TextIO) -> int:
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told):
        return int(told)
    try:
        return os.get_terminal_size(stream.fileno()).columns or _COLUMNS
    except (OSError, ValueError):
        return _COLUMNS


class _Notebook:
    """An output of the cell, which is updated and empty in the end."""

    seconds = _EVERY

    def __init__(self, publisher: Any) -> None:
        self._publisher, self._is_shown = publisher, False
        self._id = f"stowplan-{id(self)}-{monotonic_ns()}"

    def show(self, waiting: Waiting) -> None:
        """Update the output."""
        self._publish({"text/plain": waiting.line(_COLUMNS, "━─")})

    def clear(self) -> None:
        """Leave an output of no height."""
        if self._is_shown:
            self._publish({"text/plain": "", "text/html": ""})

    def _publish(self, data: dict[str, str]) -> None:
        self._publisher.publish(data=data, transient={"display_id": self._id}, update=self._is_shown)
        self._is_shown = True


class _Log:
    """A record now and then."""

    seconds = _LOG_EVERY

    def show(self, waiting: Waiting) -> None:
        """Log the line."""
        _LOGGER.info("%s", waiting.line())

    def clear(self) -> None:
        """What was logged stays."""


_showing = Lock()  # one line at a time, however many threads wait for plans
_waiting: ContextVar[Waiting | None] = ContextVar("waiting", default=None)


@contextmanager
def showing_progress(
    doing: str, *, allowed_bytes: int | None = None, stream: TextIO | None = None, silent: float = _SILENT
) -> Iterator[Waiting]:
    """Show what takes long; the work inside reports its progress by `stowplan.watch`.

    `allowed_bytes` is the budget whose best plan so far is shown during the search. Work that is part of
    other work is shown on its line.
    """
    outer = _waiting.get()
    if outer is not None:
        with outer.within(doing, allowed_bytes):
            yield outer
        return
    waiting, screen, done = Waiting(doing, allowed_bytes), _screen(stream or sys.stderr), Event()
    teller = Thread(target=_keep_showing, args=(waiting, screen, done, silent), daemon=True)
    token = _waiting.set(waiting)
    if isinstance(screen, _Terminal):
        waiting.make_room = screen.make_room
    try:
        if screen is not None:
            teller.start()
        with watched_by(waiting.told), _room_for_records(waiting):
            yield waiting
    finally:
        _waiting.reset(token)
        done.set()
        if teller.ident is not None:
            teller.join()


def _screen(stream: TextIO | None) -> _Screen | None:
    """Where progress can be seen. A process may have no standard error, or have closed it."""
    if stream is not None and not stream.closed and stream.isatty():
        return _Terminal(stream)
    publisher = _notebook()
    if publisher is not None:
        return _Notebook(publisher)
    return _Log() if _LOGGER.isEnabledFor(logging.INFO) else None


def _notebook() -> Any:
    """What shows outputs below the cell of a notebook; IPython in a terminal can only print them."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None or type(shell.display_pub).__name__ == "DisplayPublisher":
        return None
    return shell.display_pub


def _keep_showing(waiting: Waiting, screen: _Screen, done: Event, silent: float) -> None:
    """Keep the line up to date until the work is done, then clear it."""
    if done.wait(silent):
        return
    while not _showing.acquire(timeout=_EVERY):
        if done.is_set():
            return
    try:
        while True:
            screen.show(waiting)
            if done.wait(screen.seconds):
                break
        screen.clear()
    except (OSError, ValueError):
        pass  # the terminal has gone; the work goes on
    finally:
        _showing.release()


@contextmanager
def _room_for_records(waiting: Waiting) -> Iterator[None]:
    """Let no record of ours come out on the line."""

    def make_room(_: logging.LogRecord) -> bool:
        waiting.make_room()
        return True

    _LOGGER.addFilter(make_room)
    try:
        yield
    finally:
        _LOGGER.removeFilter(make_room)
