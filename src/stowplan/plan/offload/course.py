"""Course: what moves do to a schedule, told in microseconds: its peak and its seconds.

Without caps, transfers are as early and as late as their engines allow: a store begins as soon as the storage
is idle and the engine free, and ends in its own time; a load ends when it is needed or when the load behind
it has to begin. So nobody waits, and a storage is in memory while it is under way. A cap says that it must be
gone by one step, or must not be back before another, though someone then waits for it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stowplan.plan.decision import Compute, RecomputeOp, Step
from stowplan.plan.judge.simulate import Simulation
from stowplan.plan.offload.stretches import Stretch
from stowplan.plan.offload.weave import Move
from stowplan.plan.tier import Tier

_STORE, _GONE, _LOAD, _NEEDED = range(4)  # in this order where several happen between two steps


class Caps(NamedTuple):
    """Gone behind step `out` at the latest, back before step `back` at the earliest."""

    out: int
    back: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a set of moves comes to."""

    moves: tuple[Move, ...]
    peak_bytes: int
    peak_step: int
    seconds: float


class Course:
    """A schedule, the stretches in it, and a tier."""

    def __init__(
        self,
        steps: Sequence[Step],
        stretches: Sequence[Stretch],
        plain: Simulation,
        seconds: Mapping[str, float],
        tier: Tier,
        beside_bytes: int,
    ) -> None:
        self.stretches, self._tier, self._beside_bytes = stretches, tier, beside_bytes
        runs = [isinstance(step, Compute | RecomputeOp) for step in steps]
        durations = [seconds[step.op] if isinstance(step, Compute | RecomputeOp) else 0.0 for step in steps]
        self.clock = np.array([0.0, *accumulate(durations)])  # when each step begins, if nobody waits
        self._ticks: list[float] = self.clock.tolist()
        levels = np.array([*plain.curve_bytes, *plain.curve_bytes[-1:]], dtype=np.int64)
        self._curve = np.where([*runs, True], levels, 0)  # the last is what is there in the end
        self._seconds = plain.seconds
        self._next_run = _next_runs(runs)
        self.afters = np.array([stretch.after for stretch in stretches], dtype=np.int64)
        self.befores = np.array([stretch.before for stretch in stretches], dtype=np.int64)
        self._out_rank = _ranks([(stretch.after, stretch.tensors) for stretch in stretches])
        self._back_rank = _ranks([(stretch.before, stretch.tensors) for stretch in stretches])
        self._store_seconds = [tier.store_seconds(stretch.nbytes) for stretch in stretches]
        self._load_seconds = [tier.load_seconds(stretch.nbytes) for stretch in stretches]

    def idle_share(self, stretch: int) -> float:
        """How much longer a stretch is than the way out and back takes."""
        idle = self._ticks[self.stretches[stretch].before] - self._ticks[self.stretches[stretch].after + 1]
        return idle / (self._store_seconds[stretch] + self._load_seconds[stretch])

    def run_behind(self, step: int) -> int:
        """The first step from this one on that runs an op, or the end."""
        return self._next_run[min(step, len(self._next_run) - 1)]

    def outcome(self, chosen: Mapping[int, Caps]) -> Outcome:
        """Peak and seconds if these stretches are spent in the tier, by number, within their caps."""
        outs, backs = self._outs(chosen), self._backs(chosen)
        moves = {i: Move(self.stretches[i], outs[i], backs[i]) for i in chosen}
        curve = self._curve_with(moves.values())
        peak_step = int(curve.argmax()) if len(curve) else 0
        peak = int(curve[peak_step]) + (self._beside_bytes if chosen else 0) if len(curve) else 0
        return Outcome(tuple(moves.values()), peak, peak_step, self._seconds + self._stalled(moves))

    def _outs(self, chosen: Mapping[int, Caps]) -> dict[int, int]:
        """By stretch the step behind which it is gone: when its store is done, or where its cap says so."""
        outs: dict[int, int] = {}
        stored: dict[object, float] = {}
        free = 0.0
        for i in sorted(chosen, key=self._out_rank.__getitem__):
            stretch = self.stretches[i]
            key = (stretch.contents, stretch.tensors)
            if key not in stored:
                free = stored[key] = max(free, self._ticks[stretch.after + 1]) + self._store_seconds[i]
            done = bisect_left(self._ticks, stored[key], lo=stretch.after + 1) - 1
            outs[i] = min(max(done, stretch.after), chosen[i].out)
        return outs

    def _backs(self, chosen: Mapping[int, Caps]) -> dict[int, int]:
        """By stretch the step before which it is loaded: early enough, or where its cap says so."""
        backs: dict[int, int] = {}
        busy = inf
        for i in sorted(chosen, key=self._back_rank.__getitem__, reverse=True):
            busy = min(busy, self._ticks[self.stretches[i].before]) - self._load_seconds[i]
            begin = max(0, bisect_right(self._ticks, busy, hi=self.stretches[i].before + 1) - 1)
            backs[i] = self._next_run[max(begin, chosen[i].back)]
        return backs

    def _curve_with(self, moves: Iterable[Move]) -> NDArray[np.int64]:
        change = np.zeros(len(self._curve) + 1, dtype=np.int64)
        for move in moves:
            change[move.out + 1] -= move.stretch.nbytes
            change[move.back] += move.stretch.nbytes
        curve: NDArray[np.int64] = self._curve + np.cumsum(change[:-1])
        return curve

    def _stalled(self, moves: Mapping[int, Move]) -> float:
        """What steps wait for in all: each engine takes one transfer after the other."""
        stalled = out_free = back_free = 0.0
        written: dict[object, float] = {}
        read: dict[int, float] = {}
        for step, kind, _, i in sorted(self._events(moves)):
            now = self._ticks[step] + stalled
            stretch = self.stretches[i]
            key = (stretch.contents, stretch.tensors)
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
        """What happens between steps, as (the step that comes next, what, in which order, stretch)."""
        for i, move in moves.items():
            yield move.stretch.after + 1, _STORE, self._out_rank[i], i
            yield move.out + 1, _GONE, self._out_rank[i], i
            yield move.back, _LOAD, self._back_rank[i], i
            yield move.stretch.before, _NEEDED, self._back_rank[i], i


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
