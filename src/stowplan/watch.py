"""Watching a search and ending it: a plan takes seconds to minutes, and the best plan so far can be used.

Searches run deep inside planners, and there are several for one budget. The watcher and the patience are
context variables rather than parameters of all of them. Without a watcher nothing is reported, and without a
limit every search is run to its end.

`plan.progress` is the watcher for people.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import TypeAlias

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
class PlanningPhase:
    """Another part of planning that takes time, and how much of it is done, where it can be counted.

    `of` is zero where the end is not known; `done` is then what there is so far.
    """

    name: str
    done: int = 0
    of: int = 0


Watcher: TypeAlias = Callable[[Searching | PlanningPhase], None]


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
        watcher(PlanningPhase(name, done, of))
