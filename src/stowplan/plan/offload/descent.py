"""Descent: from a schedule down to ever smaller peaks, by moving away one storage after the other.

At each peak something must leave: a storage that waits there is spent in the tier, or one that is on its way
out or back there hurries, whatever costs least time for the bytes it spares. Moves that a lower peak has made
pointless are taken back.
"""

from collections.abc import Iterator
from heapq import nlargest

import numpy as np

from stowplan.plan.offload.course import Caps, Course, Outcome

_LEVELS = 24  # peaks that are aimed at, one below the other
_LOOKED_AT = 4  # candidates of each kind that are tried before one is taken
_TRIED_BACK = 48  # moves that are tried to be taken back at each level


def descend(course: Course, floor_bytes: int, capacity_bytes: int) -> Iterator[Outcome]:
    """Outcomes of smaller and smaller peaks, as far down as they go, though not below the floor."""
    descent = _Descent(course, capacity_bytes)
    top = descent.now.peak_bytes
    for level in range(1, _LEVELS + 1):
        target = top - (top - floor_bytes) * level // _LEVELS
        yield from descent.reach(target)
        if descent.now.peak_bytes > target:
            break
        yield from descent.take_back(target)


class _Descent:
    """The moves chosen so far and what they come to."""

    def __init__(self, course: Course, capacity_bytes: int) -> None:
        self._course, self._capacity_bytes = course, capacity_bytes
        self._chosen: dict[int, Caps] = {}
        self.now = course.outcome({})

    def reach(self, target: int) -> Iterator[Outcome]:
        """Choose until the peak is within the target or nothing more can leave it."""
        while self.now.peak_bytes > target:
            tried = [(i, caps, self._with(i, caps)) for i, caps in self._candidates(self.now.peak_step)]
            if not tried:
                return
            i, caps, self.now = min(tried, key=lambda entry: self._price(entry[0], entry[2], target))
            self._chosen[i] = caps
            yield self.now

    def _price(self, i: int, outcome: Outcome, target: int) -> tuple[float, float]:
        """Seconds for each byte that it spares of those that are too many; of equals the longest idle."""
        spared = min(self._course.stretches[i].nbytes, self.now.peak_bytes - target)
        return (outcome.seconds - self.now.seconds) / spared, -self._course.idle_share(i)

    def _with(self, i: int, caps: Caps) -> Outcome:
        return self._course.outcome({**self._chosen, i: caps})

    def _candidates(self, peak: int) -> Iterator[tuple[int, Caps]]:
        """What could leave step `peak`, with the caps that make it do so."""
        course, after, before = self._course, peak - 1, self._course.run_behind(peak + 1)
        around = np.flatnonzero((course.afters < peak) & (peak < course.befores)).tolist()
        new = [i for i in around if i not in self._chosen and self._fits(i)]
        for i in {*nlargest(_LOOKED_AT, new, course.idle_share), *nlargest(_LOOKED_AT, new, self._nbytes)}:
            yield i, Caps(after, before)
        moving = {move.stretch: move for move in self.now.moves}
        hurried = [
            (i, self._hurried(self._chosen[i], move.out >= peak, after, before))
            for i in around
            if (move := moving.get(course.stretches[i])) and not move.out < peak < move.back
        ]
        yield from nlargest(_LOOKED_AT, hurried, lambda pair: self._nbytes(pair[0]))

    def _hurried(self, caps: Caps, is_leaving: bool, after: int, before: int) -> Caps:
        return Caps(min(caps.out, after), caps.back) if is_leaving else Caps(caps.out, max(caps.back, before))

    def _nbytes(self, i: int) -> int:
        return self._course.stretches[i].nbytes

    def _fits(self, i: int) -> bool:
        return sum(map(self._nbytes, self._chosen)) + self._nbytes(i) <= self._capacity_bytes

    def take_back(self, target: int) -> Iterator[Outcome]:
        """Undo what is not needed for the target: those that are hidden worst first."""
        for i in sorted(self._chosen, key=self._course.idle_share)[:_TRIED_BACK]:
            fewer = {j: caps for j, caps in self._chosen.items() if j != i}
            outcome = self._course.outcome(fewer)
            if outcome.peak_bytes <= target and outcome.seconds <= self.now.seconds:
                self._chosen, self.now = fewer, outcome
                yield outcome
