"""Watching a search: plans take seconds to minutes, and whoever waits may look at the best one so far.

Searches are run deep inside of planners, and several for one budget. The watcher comes by context rather than
through all their signatures; without one, nothing is told.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
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
        """Time over the plain step of the best schedule so far that stays within a budget."""
        fitting = [seconds for peak, seconds in self.points if peak <= allowed_bytes]
        return 1 + min(fitting) / self.plain_seconds if fitting and self.plain_seconds else None

    def gap_within(self, allowed_bytes: int) -> float | None:
        """How far that may be from the best there is, as a share of it."""
        ratio = self.ratio_within(allowed_bytes)
        least = max((seconds for budget, seconds in self.bounds if budget >= allowed_bytes), default=0.0)
        return None if ratio is None else ratio / (1 + least / self.plain_seconds) - 1


Watcher: TypeAlias = Callable[[Searching], None]

_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Let a watcher see the searches inside."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def tell(searching: Callable[[], Searching]) -> None:
    """Tell the watcher, if there is one, what `searching` finds out."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(searching())
