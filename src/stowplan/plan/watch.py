"""Watching a search and ending it: a plan takes seconds to minutes, and the best plan so far can be used.

Searches run deep inside planners, and there are several for one budget. The watcher and the patience are
context variables rather than parameters of all of them. Without a watcher nothing is reported, and without a
limit every search is run to its end.

`showing_progress` is the watcher for people. It shows nothing in the first two seconds. A terminal then has a
bar on one line of standard error, which is cleared at the end; elsewhere a line is logged under "stowplan"
now and then, at level INFO.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf
from threading import Event, Thread
from time import monotonic
from typing import TextIO, TypeAlias

from stowplan.units import format_bytes, printable

Pairs: TypeAlias = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Searching:
    """How far a search is.

    `points` are the peaks and extra seconds that no schedule met so far beats in both; `bounds` are budgets
    with extra seconds that no schedule within them can avoid.
    """

    share: float
    plain_seconds: float
    points: Pairs
    bounds: Pairs = ()

    def ratio_within(self, allowed_bytes: int) -> float | None:
        """The time of the best schedule so far within a budget, over that of the baseline."""
        fitting = [seconds for peak, seconds in self.points if peak <= allowed_bytes]
        return 1 + min(fitting) / self.plain_seconds if fitting and self.plain_seconds else None

    def gap_within(self, allowed_bytes: int) -> float | None:
        """How far that may be from the best there is, as a share of it."""
        ratio = self.ratio_within(allowed_bytes)
        least = max((seconds for budget, seconds in self.bounds if budget >= allowed_bytes), default=0.0)
        return None if ratio is None else ratio / (1 + least / self.plain_seconds) - 1


@dataclass(frozen=True, slots=True)
class Phase:
    """Another part of planning that takes time, and how much of it is done, where it can be counted."""

    name: str
    done: int = 0
    of: int = 0


Watcher: TypeAlias = Callable[[Searching | Phase], None]


class Patience:
    """When searches shall end with the best that they have: after some seconds, or when the user says so."""

    def __init__(self, seconds: float | None = None, within: "Patience | None" = None) -> None:
        self._within = within
        self._deadline = inf if seconds is None else monotonic() + seconds
        self._limit = "" if seconds is None else f"the time limit of {seconds:g} s"
        self._said = ""

    def end(self, why: str) -> None:
        """Let the searches end now."""
        self._said = why

    @property
    def seconds_left(self) -> float:
        """The seconds before the limit; infinite without one."""
        own = max(0.0, self._deadline - monotonic())
        return min(own, self._within.seconds_left) if self._within else own

    @property
    def over(self) -> str:
        """What ended the searches; empty while they may continue."""
        own = self._said or (self._limit if monotonic() >= self._deadline else "")
        return own or (self._within.over if self._within else "")


_ENDLESS = Patience()
_patience: ContextVar[Patience | None] = ContextVar("patience", default=None)
_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Let a watcher see the searches inside."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


@contextmanager
def ended_by(patience: Patience) -> Iterator[None]:
    """Let the searches inside end when this patience is over."""
    token = _patience.set(patience)
    try:
        yield
    finally:
        _patience.reset(token)


@contextmanager
def limited_to(seconds: float | None) -> Iterator[None]:
    """Let the searches inside end after these seconds; None sets no further limit."""
    if seconds is None:
        yield
    else:
        with ended_by(Patience(seconds, within=patience())):
            yield


def patience() -> Patience:
    """The patience with the searches that are running."""
    return _patience.get() or _ENDLESS


def tell(searching: Callable[[], Searching]) -> None:
    """Tell the watcher, if there is one, what `searching` finds out."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(searching())


def tell_phase(name: str, done: int = 0, of: int = 0) -> None:
    """Tell the watcher, if there is one, that this part of planning has begun, or how far it is."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(Phase(name, done, of))


_LOGGER = logging.getLogger("stowplan")
_SILENT = 2.0  # seconds
_EVERY, _LOG_EVERY = 0.25, 10.0  # seconds from one look to the next
_EARLY = 0.02  # share of the work below which the rest is not estimated
_BAR, _NARROW_BAR, _NARROW = 20, 6, 100  # columns of the bar; of a terminal with little room


class Waiting:
    """The current work and its progress. The worker reports it, a thread shows it."""

    def __init__(self, doing: str, allowed_bytes: int | None = None) -> None:
        self._doing = printable(doing).replace("\n", " ")
        self._allowed_bytes = allowed_bytes
        self._begun = self._stage_begun = monotonic()
        self._stage, self._far, self._found = "", "", ""
        self.share = 0.0  # of the stage that is done
        self.has_plan = False  # whether a search has met a schedule within the budget

    def told(self, news: Searching | Phase) -> None:
        """Work has begun or has made progress; there may be several searches."""
        if isinstance(news, Searching):
            self._enter("searching", news.share)
            self._far, self._found = f" {news.share:.0%}", self._best(news)
        else:
            self._enter(news.name, news.done / max(1, news.of))
            self._far, self._found = f" {news.done:,} of {news.of:,}" if news.of else "", ""

    def line(self, width: int) -> str:
        """The whole line; the description of the work is shortened first."""
        now = monotonic()
        spent = now - self._stage_begun
        early = self.share <= _EARLY
        time = f"{now - self._begun:.0f} s" if early else f"about {_told(spent / self.share - spent)} left"
        parts = (f"{self._stage}{self._far}", time, self._found)
        rest = ", ".join(part for part in parts if part)
        return f"{_shortened(self._doing, width - len(rest) - 2)}: {rest}"[:width]

    def _enter(self, stage: str, share: float) -> None:
        if stage != self._stage or share < self.share:
            self._stage, self._stage_begun = stage, monotonic()
        self.share = share

    def _best(self, searching: Searching) -> str:
        if self._allowed_bytes is None:
            return f"down to {format_bytes(int(min(peak for peak, _ in searching.points)))}"
        ratio = searching.ratio_within(self._allowed_bytes)
        gap = searching.gap_within(self._allowed_bytes)
        if ratio is None:
            return "nothing fits yet"
        self.has_plan = True
        return f"best {ratio:.3f} x baseline, gap {gap:.1%}"


def _shortened(text: str, width: int) -> str:
    """Both ends of a text that is too long."""
    head = max(0, (width - 3) // 2)
    return text if len(text) <= width else f"{text[:head]}...{text[len(text) - head :]}"


def _told(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


@contextmanager
def showing_progress(
    doing: str, *, allowed_bytes: int | None = None, stream: TextIO | None = None, silent: float = _SILENT
) -> Iterator[Waiting]:
    """Show what takes long; the work inside reports its progress by `plan.watch`.

    `allowed_bytes` is the budget whose best plan so far is shown during the search.
    """
    waiting, screen = Waiting(doing, allowed_bytes), stream or sys.stderr
    done = Event()
    show = _draw if screen.isatty() else _log
    teller = Thread(target=show, args=(waiting, screen, done, silent), daemon=True)
    if screen.isatty() or _LOGGER.isEnabledFor(logging.INFO):
        teller.start()
    try:
        with watched_by(waiting.told):
            yield waiting
    finally:
        done.set()
        if teller.ident is not None:
            teller.join()


def _draw(waiting: Waiting, screen: TextIO, done: Event, silent: float) -> None:
    """Keep a bar up to date until the work is done, then clear it."""
    if done.wait(silent):
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(file=screen)
    bar_width = _BAR if console.width > _NARROW else _NARROW_BAR
    columns = BarColumn(bar_width), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=1.0)
        while True:
            bar.update(task, completed=waiting.share, description=waiting.line(console.width - bar_width - 2))
            bar.refresh()
            if done.wait(_EVERY):
                return


def _log(waiting: Waiting, _: TextIO, done: Event, silent: float) -> None:
    pause = silent
    while not done.wait(pause):
        _LOGGER.info("%s", waiting.line(sys.maxsize))
        pause = _LOG_EVERY
