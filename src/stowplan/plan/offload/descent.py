"""Descent: from a schedule to ever smaller peaks, by offloading one storage after the other.

At each peak a storage must leave: an idle one is offloaded, or a transfer that overlaps the peak is shifted
away from it, whichever costs the fewest seconds per byte. Moves that a smaller peak does not need are undone.
"""

from collections.abc import Iterator
from heapq import nlargest

import numpy as np

from stowplan.plan.offload.transfer_schedule import Caps, Outcome, TransferSchedule

_LEVELS = 24  # peaks that are aimed at, one below the other
_LOOKED_AT = 4  # candidates of each kind that are tried before one is taken
_TRIED_BACK = 48  # moves that are tried to be taken back at each level


def descend(transfers: TransferSchedule, floor_bytes: int, capacity_bytes: int) -> Iterator[Outcome]:
    """Outcomes with smaller and smaller peaks, down to the smallest possible, but not below the floor."""
    descent = _Descent(transfers, capacity_bytes)
    top = descent.now.peak_bytes
    for level in range(1, _LEVELS + 1):
        target = top - (top - floor_bytes) * level // _LEVELS
        yield from descent.reach(target)
        if descent.now.peak_bytes > target:
            break
        yield from descent.take_back(target)


class _Descent:
    """The moves chosen so far and their outcome."""

    def __init__(self, transfers: TransferSchedule, capacity_bytes: int) -> None:
        self._transfers, self._capacity_bytes = transfers, capacity_bytes
        self._chosen: dict[int, Caps] = {}
        self.now = transfers.outcome({})

    def reach(self, target: int) -> Iterator[Outcome]:
        """Choose moves until the peak is within the target, or no more storage can leave it."""
        while self.now.peak_bytes > target:
            tried = [(i, caps, self._with(i, caps)) for i, caps in self._candidates(self.now.peak_step)]
            if not tried:
                return
            i, caps, self.now = min(tried, key=lambda entry: self._price(entry[0], entry[2], target))
            self._chosen[i] = caps
            yield self.now

    def _price(self, i: int, outcome: Outcome, target: int) -> tuple[float, float]:
        """Seconds per byte removed from the excess over the target; among equals the longest idle first."""
        spared = min(self._transfers.intervals[i].nbytes, self.now.peak_bytes - target)
        return (outcome.seconds - self.now.seconds) / spared, -self._transfers.idle_share(i)

    def _with(self, i: int, caps: Caps) -> Outcome:
        return self._transfers.outcome({**self._chosen, i: caps})

    def _candidates(self, peak: int) -> Iterator[tuple[int, Caps]]:
        """The intervals whose storage could leave step `peak`, with the caps that make it leave."""
        transfers, after, before = self._transfers, peak - 1, self._transfers.run_from(peak + 1)
        around = np.flatnonzero((transfers.afters < peak) & (peak < transfers.befores)).tolist()
        new = [i for i in around if i not in self._chosen and self._fits(i)]
        for i in {*nlargest(_LOOKED_AT, new, transfers.idle_share), *nlargest(_LOOKED_AT, new, self._nbytes)}:
            yield i, Caps(after, before)
        moving = {move.interval: move for move in self.now.moves}
        hurried = [
            (i, self._hurried(self._chosen[i], move.out >= peak, after, before))
            for i in around
            if (move := moving.get(transfers.intervals[i])) and not move.out < peak < move.back
        ]
        yield from nlargest(_LOOKED_AT, hurried, lambda pair: self._nbytes(pair[0]))

    def _hurried(self, caps: Caps, is_leaving: bool, after: int, before: int) -> Caps:
        return Caps(min(caps.out, after), caps.back) if is_leaving else Caps(caps.out, max(caps.back, before))

    def _nbytes(self, i: int) -> int:
        return self._transfers.intervals[i].nbytes

    def _fits(self, i: int) -> bool:
        return sum(map(self._nbytes, self._chosen)) + self._nbytes(i) <= self._capacity_bytes

    def take_back(self, target: int) -> Iterator[Outcome]:
        """Undo moves that the target does not need, those with the least idle time first."""
        for i in sorted(self._chosen, key=self._transfers.idle_share)[:_TRIED_BACK]:
            fewer = {j: caps for j, caps in self._chosen.items() if j != i}
            outcome = self._transfers.outcome(fewer)
            if outcome.peak_bytes <= target and outcome.seconds <= self.now.seconds:
                self._chosen, self.now = fewer, outcome
                yield outcome
