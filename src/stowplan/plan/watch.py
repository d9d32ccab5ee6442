"""Watching a search: a plan takes seconds to minutes, and a caller can watch the best plan so far.

Searches run deep inside planners, and there are several for one budget. The watcher is a context variable
rather than a parameter of all of them; without a watcher nothing is reported.
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
        """The time of the best schedule so far within a budget, over that of the baseline."""
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
