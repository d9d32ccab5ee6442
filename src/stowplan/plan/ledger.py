"""Ledger: the accounts of a schedule, kept exact while single decisions change.

A schedule is the graph's order plus one state per value made in the forward half:

- KEEP: made once, lives to its last reader;
- HOLD: dropped after its last forward reader, made again before the first backward op that needs it, then
  held to the last one;
- EACH: dropped likewise, made again for every backward op that needs it.

Before a backward op runs, the forward ops that make what it misses run again in forward order (its chain).
So the memory while op s runs, or its chain does, is `standing + through[s] + local[s]`: `through[s]` counts
the values that live from before to after s, `local[s]` is the highest sum of those that come or go at s. A
change of one state touches only the ops whose chains involve the value; all else stays as it was booked.
"""

from dataclasses import dataclass
from enum import IntEnum
from heapq import heapify, heappop, heappush
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stowplan.plan.problem import Numbers, Problem

_NEVER = -1
Span = tuple[int, int]


class State(IntEnum):
    """What happens to a forward value between the two halves."""

    KEEP = 0
    HOLD = 1
    EACH = 2


@dataclass(frozen=True, slots=True)
class _Chain:
    """What runs again before an op; a value is demanded if made there, involved if made or read there."""

    op: int
    ops: Numbers = ()
    demanded: frozenset[int] = frozenset()
    involved: frozenset[int] = frozenset()
    seconds: float = 0.0


class _State(NamedTuple):
    value: int
    state: State
    remade: int


class _Remake(NamedTuple):
    value: int
    remade: int


class _Spans(NamedTuple):
    value: int
    spans: tuple[Span, ...]


class _Local(NamedTuple):
    op: int
    nbytes: int


_Change: TypeAlias = _State | _Remake | _Chain | _Spans | _Local  # an entry as it was before


class Ledger:
    """Mutable on purpose: a search calls `set_state` thousands of times."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        ops, values = len(problem.reads), len(problem.nbytes)
        self.states = [State.KEEP] * values
        self.extra_seconds = 0.0
        self._chains = [_Chain(op) for op in range(ops)]
        self._direct, self._last_forward = _readers(problem)
        self._via: list[set[int]] = [set() for _ in range(values)]  # ops whose chain involves the value
        self._remade = [_NEVER] * values  # the op before which a HOLD value is made again
        self._spans: list[tuple[Span, ...]] = [()] * values
        self._starts, self._ends = np.full((2, values), _NEVER), np.full((2, values), _NEVER)
        self._droppable = np.array(problem.droppable, dtype=bool)
        self._through = np.zeros(ops, dtype=np.int64)
        self._local = np.zeros(ops, dtype=np.int64)
        self._changes: list[_Change] = []
        for value in range(values):
            self._rebook(value)
        for op in range(ops):
            self._local[op] = self._local_peak(op)
        self.commit()

    def curve_bytes(self) -> NDArray[np.int64]:
        """The highest memory while each op or its chain runs."""
        curve: NDArray[np.int64] = self._through + self._local + self.problem.standing_bytes
        return curve

    def last_reader(self, value: int) -> int:
        """The last op that reads the value itself; -1 if none after the turn does."""
        return self._direct[value][-1] if self._direct[value] else _NEVER

    def alive_across(self, op: int) -> NDArray[np.int64]:
        """Droppable values that stay alive from before `op` to after it."""
        return np.flatnonzero(((self._starts < op) & (op < self._ends)).any(axis=0) & self._droppable)

    def commit(self) -> None:
        """Make the changes since the last commit final."""
        self._changes.clear()

    def roll_back(self) -> None:
        """Take back the changes since the last commit."""
        while self._changes:
            change = self._changes.pop()
            match change:
                case _State(value, state, remade):
                    self.states[value], self._remade[value] = state, remade
                case _Remake(value, remade):
                    self._remade[value] = remade
                case _Chain():
                    self._enter_chain(change)
                case _Spans(value, spans):
                    self._enter_spans(value, spans)
                case _Local(op, nbytes):
                    self._local[op] = nbytes

    def set_state(self, value: int, state: State) -> None:
        """Decide otherwise about one value and rebook what that touches."""
        self._changes.append(_State(value, self.states[value], self._remade[value]))
        self.states[value] = state
        self._remade[value] = _NEVER
        queue = [*self._direct[value], *self._via[value]]
        heapify(queue)
        dirty, changed = {value}, set[int]()
        while queue:
            op = heappop(queue)
            while queue and queue[0] == op:
                heappop(queue)
            changed.add(op)
            for later in self._rechain(op, dirty):
                heappush(queue, later)
        for touched in dirty:
            changed |= self._rebook(touched)
        for op in changed:
            self._changes.append(_Local(op, int(self._local[op])))
            self._local[op] = self._local_peak(op)

    def _available(self, value: int, op: int) -> bool:
        state = self.states[value]
        return state is State.KEEP or (state is State.HOLD and _NEVER < self._remade[value] < op)

    def _rechain(self, op: int, dirty: set[int]) -> list[int]:
        """Find anew what must run again before `op`; returns later ops whose chains may change by it."""
        before, now = self._chains[op], self._chain_of(op)
        if now != before:
            self._changes.append(before)
            dirty |= now.involved ^ before.involved
            self._enter_chain(now)
        later: list[int] = []
        for value in now.demanded | before.demanded:
            if self.states[value] is State.HOLD and self._move_remake(value, op, value in now.demanded):
                dirty.add(value)
                later += (reader for reader in (*self._direct[value], *self._via[value]) if reader > op)
        return later

    def _enter_chain(self, chain: "_Chain") -> None:
        before = self._chains[chain.op]
        for value in before.involved - chain.involved:
            self._via[value].discard(chain.op)
        for value in chain.involved - before.involved:
            self._via[value].add(chain.op)
        self.extra_seconds += chain.seconds - before.seconds
        self._chains[chain.op] = chain

    def _move_remake(self, value: int, op: int, demanded: bool) -> bool:
        """Note that `value` is made again before `op`, or no longer is; says whether that is news."""
        if demanded == (self._remade[value] == op):
            return False
        self._changes.append(_Remake(value, self._remade[value]))
        self._remade[value] = op if demanded else _NEVER
        return True

    def _chain_of(self, op: int) -> "_Chain":
        problem = self.problem
        missing = [value for value in problem.reads[op] if not self._available(value, op)]
        if not missing:
            return _Chain(op)
        demanded, ready, chain = set(missing), set[int](), set[int]()
        while missing:
            maker = problem.producer[missing.pop()]
            if maker in chain:
                continue
            chain.add(maker)
            for value in problem.reads[maker]:
                if self._available(value, op):
                    ready.add(value)
                elif value not in demanded:
                    demanded.add(value)
                    missing.append(value)
        seconds = sum(problem.seconds[again] for again in chain)
        return _Chain(op, tuple(sorted(chain)), frozenset(demanded), frozenset(demanded | ready), seconds)

    def _spans_of(self, value: int) -> tuple[Span, ...]:
        """From which op to which op the value exists; a second span where it is made again and held."""
        problem, state = self.problem, self.states[value]
        last = max((*self._direct[value][-1:], *self._via[value]), default=_NEVER)
        if problem.held[value]:
            last = len(problem.reads)
        first = problem.producer[value], self._last_forward[value]
        if state is State.KEEP:
            return ((first[0], max(first[1], last)),)
        if state is State.HOLD and self._remade[value] != _NEVER:
            return first, (self._remade[value], last)
        return (first,)

    def _rebook(self, value: int) -> set[int]:
        """Enter the lifetimes of `value` anew; returns the ops at which it now comes or goes otherwise."""
        spans, before = self._spans_of(value), self._spans[value]
        if spans == before:
            return set()
        self._changes.append(_Spans(value, before))
        self._enter_spans(value, spans)
        return {op for span in set(before) ^ set(spans) for op in span if 0 <= op < len(self._local)}

    def _enter_spans(self, value: int, spans: tuple[Span, ...]) -> None:
        nbytes = self.problem.nbytes[value]
        for start, end in self._spans[value]:
            self._through[start + 1 : max(start + 1, end)] -= nbytes
        for start, end in spans:
            self._through[start + 1 : max(start + 1, end)] += nbytes
        self._spans[value] = spans
        for number in range(2):
            start, end = spans[number] if number < len(spans) else (_NEVER, _NEVER)
            self._starts[number, value], self._ends[number, value] = start, end

    def _local_peak(self, op: int) -> int:
        """The highest sum, over the chain of `op` and `op` itself, of what comes or goes meanwhile."""
        problem, demanded = self.problem, self._chains[op].demanded
        sequence = (*self._chains[op].ops, op)
        change = [0] * (len(sequence) + 1)
        made: dict[int, int] = {}
        last: dict[int, int] = {}
        for index, running in enumerate(sequence):
            for value in problem.reads[running]:
                last[value] = index
            for value in problem.writes[running]:
                if running == op or value in demanded:
                    made[value] = last[value] = index
                else:  # a second output that nothing misses: there and gone
                    change[index] += problem.nbytes[value]
                    change[index + 1] -= problem.nbytes[value]
        dying: set[int] = set()
        for value, index in last.items():
            outlives = self._outlives(value, op, value in made)
            if not outlives:
                dying.add(value)
            if value in made or not outlives:
                change[made.get(value, 0)] += problem.nbytes[value]
                change[len(sequence) if outlives else index + 1] -= problem.nbytes[value]
        level, peak = 0, 0
        for index, running in enumerate(sequence):
            level += change[index]
            here = level + problem.temporary_bytes[running]
            for target, victims in problem.in_place[running]:
                if any(victim in dying and last[victim] == index for victim in victims):
                    here -= problem.nbytes[target]
            if here > peak:
                peak = here
        return peak

    def _outlives(self, value: int, op: int, made_here: bool) -> bool:
        """Whether the copy of `value` that op or its chain uses is still there afterwards."""
        for start, end in self._spans[value]:
            if start == op if made_here else start < op <= end:
                return end > op
        return False


def _readers(problem: Problem) -> tuple[list[list[int]], list[int]]:
    """By value: the ops after the turn that read it, and the last op before it that makes or reads it."""
    direct: list[list[int]] = [[] for _ in problem.nbytes]
    last_forward = list(problem.producer)
    for op, values in enumerate(problem.reads):
        for value in values:
            if op < problem.turn:
                last_forward[value] = op
            else:
                direct[value].append(op)
    return direct, last_forward
