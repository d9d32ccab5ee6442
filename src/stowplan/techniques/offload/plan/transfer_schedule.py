"""Transfer schedule: the peak and the seconds of a schedule with offloaded storages, computed in
microseconds.

Without caps, no step waits for a transfer. A store begins as soon as the storage is idle and the engine is
free. A load ends when its storage is needed, or when the next load must begin. The storage counts as memory
during both transfers. A cap forces a storage out after one step, or keeps it out until another step; steps
may then wait.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stowplan.plan.judge.simulate import Simulation
from stowplan.plan.pricing import Tier
from stowplan.plan.steps import Compute, RecomputeOp, Step
from stowplan.techniques.offload.plan.idle_intervals import IdleInterval
from stowplan.techniques.offload.plan.insert_transfers import Move

_STORE, _GONE, _LOAD, _NEEDED = range(4)  # in this order where several happen between two steps


class Caps(NamedTuple):
    """Freed after step `out` at the latest, loaded before step `back` at the earliest."""

    out: int
    back: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The peak and the seconds of a set of moves."""

    moves: tuple[Move, ...]
    peak_bytes: int
    peak_step: int
    seconds: float


class TransferSchedule:
    """Times the transfers of a schedule: its idle intervals, and the tier that storages are offloaded to."""

    def __init__(
        self,
        steps: Sequence[Step],
        intervals: Sequence[IdleInterval],
        baseline: Simulation,
        seconds: Mapping[str, float],
        tier: Tier,
        beside_bytes: int,
    ) -> None:
        self.intervals, self._tier, self._beside_bytes = intervals, tier, beside_bytes
        runs = [isinstance(step, Compute | RecomputeOp) for step in steps]
        durations = [seconds[step.op] if isinstance(step, Compute | RecomputeOp) else 0.0 for step in steps]
        self.clock = np.array([0.0, *accumulate(durations)])  # when each step begins, if nobody waits
        self._ticks: list[float] = self.clock.tolist()
        levels = np.array([*baseline.curve_bytes, *baseline.curve_bytes[-1:]], dtype=np.int64)
        self._curve = np.where([*runs, True], levels, 0)  # the last entry is the memory after the step
        self._seconds = baseline.seconds
        self._next_run = _next_runs(runs)
        self.afters = np.array([interval.after for interval in intervals], dtype=np.int64)
        self.befores = np.array([interval.before for interval in intervals], dtype=np.int64)
        self._out_rank = _ranks([(interval.after, interval.tensors) for interval in intervals])
        self._back_rank = _ranks([(interval.before, interval.tensors) for interval in intervals])
        self._store_seconds = [tier.store_seconds(interval.nbytes) for interval in intervals]
        self._load_seconds = [tier.load_seconds(interval.nbytes) for interval in intervals]

    def idle_share(self, interval: int) -> float:
        """The length of an idle interval over the seconds of its two transfers."""
        idle = self._ticks[self.intervals[interval].before] - self._ticks[self.intervals[interval].after + 1]
        return idle / (self._store_seconds[interval] + self._load_seconds[interval])

    def run_from(self, step: int) -> int:
        """The first step from this one on that runs an op, or the end."""
        return self._next_run[min(step, len(self._next_run) - 1)]

    def outcome(self, chosen: Mapping[int, Caps]) -> Outcome:
        """Peak and seconds if these intervals, by number, are spent in the tier, within their caps."""
        outs, backs = self._outs(chosen), self._backs(chosen)
        moves = {i: Move(self.intervals[i], outs[i], backs[i]) for i in chosen}
        curve = self._curve_with(moves.values())
        peak_step = int(curve.argmax()) if len(curve) else 0
        peak = int(curve[peak_step]) + (self._beside_bytes if chosen else 0) if len(curve) else 0
        return Outcome(tuple(moves.values()), peak, peak_step, self._seconds + self._stalled(moves))

    def _outs(self, chosen: Mapping[int, Caps]) -> dict[int, int]:
        """By interval, the step after which the storage is freed: when its store is done, or at its cap."""
        outs: dict[int, int] = {}
        stored: dict[object, float] = {}
        free = 0.0
        for i in sorted(chosen, key=self._out_rank.__getitem__):
            interval = self.intervals[i]
            key = (interval.contents, interval.tensors)
            if key not in stored:
                free = stored[key] = max(free, self._ticks[interval.after + 1]) + self._store_seconds[i]
            done = bisect_left(self._ticks, stored[key], lo=interval.after + 1) - 1
            outs[i] = min(max(done, interval.after), chosen[i].out)
        return outs

    def _backs(self, chosen: Mapping[int, Caps]) -> dict[int, int]:
        """By interval, the step before which its load begins: early enough, or at its cap."""
        backs: dict[int, int] = {}
        busy = inf
        for i in sorted(chosen, key=self._back_rank.__getitem__, reverse=True):
            busy = min(busy, self._ticks[self.intervals[i].before]) - self._load_seconds[i]
            begin = max(0, bisect_right(self._ticks, busy, hi=self.intervals[i].before + 1) - 1)
            backs[i] = self._next_run[max(begin, chosen[i].back)]
        return backs

    def _curve_with(self, moves: Iterable[Move]) -> NDArray[np.int64]:
        change = np.zeros(len(self._curve) + 1, dtype=np.int64)
        for move in moves:
            change[move.out + 1] -= move.interval.nbytes
            change[move.back] += move.interval.nbytes
        curve: NDArray[np.int64] = self._curve + np.cumsum(change[:-1])
        return curve

    def _stalled(self, moves: Mapping[int, Move]) -> float:
        """The seconds that steps wait in all: each engine runs one transfer after the other."""
        stalled = out_free = back_free = 0.0
        written: dict[object, float] = {}
        read: dict[int, float] = {}
        for step, kind, _, i in sorted(self._events(moves)):
            now = self._ticks[step] + stalled
            interval = self.intervals[i]
            key = (interval.contents, interval.tensors)
            if kind == _NEEDED:
                stalled += max(0.0, read[i] - now)
            elif kind == _STORE and key not in written:
                written[key] = out_free = max(now, out_free) + self._store_seconds[i]
            elif kind == _GONE:
                stalled += max(0.0, written[key] - now)
            elif kind == _LOAD:
                read[i] = back_free = max(now, back_free, written[key]) + self._load_seconds[i]
        return stalled

    def _events(self, moves: Mapping[int, Move]) -> Iterator[tuple[int, int, int, int]]:
        """The events between steps, as (next step, kind of event, order within the kind, interval)."""
        for i, move in moves.items():
            yield move.interval.after + 1, _STORE, self._out_rank[i], i
            yield move.out + 1, _GONE, self._out_rank[i], i
            yield move.back, _LOAD, self._back_rank[i], i
            yield move.interval.before, _NEEDED, self._back_rank[i], i


def _next_runs(runs: Sequence[bool]) -> list[int]:
    """By step, the end included: the first from it on that runs an op."""
    following = [len(runs)]
    for number in reversed(range(len(runs))):
        following.append(number if runs[number] else following[-1])
    return following[::-1]


def _ranks(keys: Sequence[tuple[int, tuple[str, ...]]]) -> list[int]:
    ranks = [0] * len(keys)
    for rank, i in enumerate(sorted(range(len(keys)), key=keys.__getitem__)):
        ranks[i] = rank
    return ranks
