"""Ledger: the accounts of a schedule, kept exact while single decisions change, and its list of steps.

A schedule is the graph's order plus one state per gap. The gaps of a forward value lie between the ops that
use it: from its maker to its first reader, from there to the next, and one after the last. In a gap it is

- KEEP: in memory throughout;
- HOLD: dropped, recomputed for the first op that needs it to recompute another value, then kept;
- EACH: dropped, and recomputed for each op that needs it;
- AHEAD: dropped, and recomputed one op before its next reader, where memory is still free.

Before an op runs, the forward ops that make its missing inputs are recomputed in their order (its chain). The
memory while op s or its chain runs is `standing + through[s] + local[s]`: `through[s]` counts the values that
live from before s to after s, and `local[s]` is the highest sum of those that begin or end at s. A change of
one gap affects only the ops whose chains involve the value there; all other entries stay.

`steps_of` writes the schedule down: what runs when, what is overwritten, what is freed. Three passes: find
the runs (every op once, and again where a tensor is missing), find each copy's last reader, then write the
steps with every free right behind it.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heapify, heappop, heappush
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stowplan.analyse.facts import is_resident, storages_of
from stowplan.ir import Graph, Op
from stowplan.ops.table import site_of
from stowplan.plan.problem import Numbers, Problem, added_by, overwritable, ticks_of
from stowplan.plan.steps import Compute, Free, RecomputeOp, Step

_NEVER = -1
Span = tuple[int, int]
Policy = bytes  # a State for each gap


class State(IntEnum):
    """The treatment of a value in a gap between two of its uses."""

    KEEP = 0
    HOLD = 1
    EACH = 2
    AHEAD = 3


_STATES = tuple(State)


def states_of(policy: Policy) -> tuple[State, ...]:
    """The state of each gap."""
    return tuple(map(_STATES.__getitem__, policy))  # several times as fast as State(number)


@dataclass(frozen=True, slots=True)
class Gaps:
    """The gaps of all droppable values, numbered: those of value v begin at `first[v]`.

    Gap i of a value runs from `uses[v][i]` (its maker comes first) to the next use, the last one to the end.
    """

    uses: tuple[Numbers, ...]
    first: Numbers
    value_of: Numbers

    def at(self, value: int, op: int) -> int:
        """The gap in which `op` finds the value: after the last use before `op`."""
        return self.first[value] + bisect_left(self.uses[value], op) - 1

    def of(self, value: int) -> range:
        """All gaps of a value; none if it may not be dropped."""
        return range(self.first[value], self.first[value + 1])

    def start(self, gap: int) -> int:
        """The use that the gap begins after."""
        value = self.value_of[gap]
        return self.uses[value][gap - self.first[value]]

    def next_use(self, gap: int) -> int | None:
        """The use that the gap ends at; None for the gap after the last use."""
        value = self.value_of[gap]
        place = gap - self.first[value] + 1
        return self.uses[value][place] if place < len(self.uses[value]) else None


def gaps_of(problem: Problem) -> Gaps:
    """Number the gaps."""
    uses: list[list[int]] = [[maker] for maker in problem.producer]
    for op, values in enumerate(problem.reads):
        for value in values:
            uses[value].append(op)
    first, value_of = [0], list[int]()
    for value, droppable in enumerate(problem.droppable):
        value_of += [value] * (len(uses[value]) if droppable else 0)
        first.append(len(value_of))
    return Gaps(tuple(map(tuple, uses)), tuple(first), tuple(value_of))


@dataclass(frozen=True, slots=True)
class _Chain:
    """The ops recomputed before an op; a value is demanded if made there, involved if made or read there."""

    op: int
    ops: Numbers = ()
    demanded: frozenset[int] = frozenset()
    involved: frozenset[int] = frozenset()
    ticks: int = 0


class _State(NamedTuple):
    gap: int
    state: State
    remade: int


class _Remake(NamedTuple):
    gap: int
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
        self.problem, self.gaps = problem, gaps_of(problem)
        ops, values, gaps = len(problem.reads), len(problem.nbytes), len(self.gaps.value_of)
        self.states = [State.KEEP] * gaps
        self._ticks, self._tick_seconds = ticks_of(problem)
        self.extra_ticks = 0
        self._remade = [_NEVER] * gaps  # the op before which a HOLD value is recomputed
        self._ahead: list[set[int]] = [set() for _ in range(ops)]  # AHEAD values to be made before the op
        self._chains = [_Chain(op) for op in range(ops)]
        self._via: list[set[int]] = [set() for _ in range(values)]  # ops whose chain involves the value
        self._spans: list[tuple[Span, ...]] = [()] * values
        self._starts, self._ends = (
            np.full(gaps, _NEVER),
            np.full(gaps, _NEVER),
        )  # what a gap adds to the spans
        self._through = np.zeros(ops, dtype=np.int64)
        self._local = np.zeros(ops, dtype=np.int64)
        self._changes: list[_Change] = []
        for value in range(values):
            self._rebook(value)
        for op in range(ops):
            self._local[op] = self._local_peak(op)
        self.commit()

    @property
    def extra_seconds(self) -> float:
        """The seconds of all ops that are recomputed."""
        return self.extra_ticks * self._tick_seconds

    def curve_bytes(self) -> NDArray[np.int64]:
        """The highest memory while each op or its chain runs."""
        curve: NDArray[np.int64] = self._through + self._local + self.problem.standing_bytes
        return curve

    def occupied_across(self, op: int) -> NDArray[np.int64]:
        """The gaps in which a value is in memory from before `op` to after it."""
        return np.flatnonzero((self._starts < op) & (op < self._ends))

    def commit(self) -> None:
        """Make the changes since the last commit final."""
        self._changes.clear()

    def roll_back(self) -> None:
        """Take back the changes since the last commit."""
        while self._changes:
            change = self._changes.pop()
            match change:
                case _State(gap, state, remade):
                    self._enter_state(gap, state)
                    self._remade[gap] = remade
                case _Remake(gap, remade):
                    self._remade[gap] = remade
                case _Chain():
                    self._enter_chain(change)
                case _Spans(value, spans):
                    self._enter_spans(value, spans)
                case _Local(op, nbytes):
                    self._local[op] = nbytes

    def load(self, states: Sequence[State]) -> None:
        """Set the states of all gaps at once and recompute every entry; final like a commit."""
        for gap, state in enumerate(states):
            self._enter_state(gap, state)
        self._remade = [_NEVER] * len(self.states)
        for op in range(
            len(self._local)
        ):  # in order, because later ops depend on the values held by earlier ones
            self._rechain(op, set())
        for value in range(len(self._spans)):
            self._rebook(value)
        for op in range(len(self._local)):
            self._local[op] = self._local_peak(op)
        self.commit()

    def set_state(self, gap: int, state: State) -> None:
        """Decide otherwise about one gap and rebook what that touches."""
        value = self.gaps.value_of[gap]
        self._changes.append(_State(gap, self.states[gap], self._remade[gap]))
        self._enter_state(gap, state)
        self._remade[gap] = _NEVER
        queue = self._touched(gap, self.gaps.start(gap))
        if (reader := self.gaps.next_use(gap)) is not None:
            queue.append(reader - 1)
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

    def _enter_state(self, gap: int, state: State) -> None:
        value, reader = self.gaps.value_of[gap], self.gaps.next_use(gap)
        self.states[gap] = state
        if reader is not None:
            (self._ahead[reader - 1].add if state is State.AHEAD else self._ahead[reader - 1].discard)(value)

    def _touched(self, gap: int, after: int) -> list[int]:
        """The ops after `after` that find the value in this gap: its next reader, and chains before it."""
        value, reader = self.gaps.value_of[gap], self.gaps.next_use(gap)
        if reader is None:
            return [op for op in self._via[value] if after < op]
        return [reader, *(op for op in self._via[value] if after < op < reader)]

    def _available(self, value: int, op: int) -> bool:
        if not self.problem.droppable[value]:
            return True
        gap = self.gaps.at(value, op)
        state = self.states[gap]
        return (
            state is State.KEEP
            or (state is State.HOLD and _NEVER < self._remade[gap] < op)
            or (state is State.AHEAD and self.gaps.next_use(gap) == op)
        )

    def _rechain(self, op: int, dirty: set[int]) -> list[int]:
        """Update the chain of ops recomputed before `op`; returns later ops whose chains may change by it."""
        before, now = self._chains[op], self._chain_of(op)
        if now != before:
            self._changes.append(before)
            dirty |= now.involved ^ before.involved
            self._enter_chain(now)
        later: list[int] = []
        for value in now.demanded | before.demanded:
            gap = self.gaps.at(value, op)
            if self.states[gap] is State.HOLD and self._move_remake(gap, op, value in now.demanded):
                dirty.add(value)
                later += self._touched(gap, op)
        return later

    def _enter_chain(self, chain: _Chain) -> None:
        before = self._chains[chain.op]
        for value in before.involved - chain.involved:
            self._via[value].discard(chain.op)
        for value in chain.involved - before.involved:
            self._via[value].add(chain.op)
        self.extra_ticks += chain.ticks - before.ticks
        self._chains[chain.op] = chain

    def _move_remake(self, gap: int, op: int, demanded: bool) -> bool:
        """Set whether the gap's value is recomputed before `op`; returns whether that changed."""
        if demanded == (self._remade[gap] == op):
            return False
        self._changes.append(_Remake(gap, self._remade[gap]))
        self._remade[gap] = op if demanded else _NEVER
        return True

    def _chain_of(self, op: int) -> _Chain:
        problem = self.problem
        ahead = (value for value in self._ahead[op] if problem.producer[value] != op)
        missing = [value for value in (*problem.reads[op], *ahead) if not self._available(value, op)]
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
        ticks = sum(self._ticks[again] for again in chain)
        return _Chain(op, tuple(sorted(chain)), frozenset(demanded), frozenset(demanded | ready), ticks)

    def _spans_of(self, value: int) -> tuple[Span, ...]:
        """From which op to which op the value is in memory without a break."""
        uses, problem = self.gaps.uses[value], self.problem
        latest = max(self._via[value], default=_NEVER)
        if not problem.droppable[value]:
            end = len(problem.reads) if problem.held[value] else max(uses[-1], latest)
            return ((uses[0], end),)
        spans: list[Span] = []
        for place, gap in enumerate(self.gaps.of(value)):
            end = uses[place + 1] if place + 1 < len(uses) else latest
            start = self._span_start(gap, uses[place])
            if not _NEVER < start <= end:
                continue
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], end)
            else:
                spans.append((start, end))
        return tuple(spans)

    def _span_start(self, gap: int, use: int) -> int:
        match self.states[gap]:
            case State.KEEP:
                return use
            case State.HOLD:
                return self._remade[gap]
            case State.AHEAD:
                return (self.gaps.next_use(gap) or 0) - 1
            case State.EACH:
                return _NEVER

    def _rebook(self, value: int) -> set[int]:
        """Update the lifetimes of `value`; returns the ops at which it now begins or ends differently."""
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
        self._occupy(value, spans)

    def _occupy(self, value: int, spans: tuple[Span, ...]) -> None:
        uses = self.gaps.uses[value]
        for place, gap in enumerate(self.gaps.of(value)):
            end = uses[place + 1] if place + 1 < len(uses) else len(self._local)
            inside = [(s, e) for s, e in spans if s < end and e > uses[place]]
            self._starts[gap] = max(inside[0][0], uses[place]) if inside else _NEVER
            self._ends[gap] = min(inside[0][1], end) if inside else _NEVER

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
                if target in made and any(victim in dying and last[victim] == index for victim in victims):
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


Copy = tuple[str, int]  # a tensor and how many times it had been made before


@dataclass(slots=True)
class _Run:
    """One execution of an op: the copies that it reads, those that it leaves, those that end with it."""

    op: Op
    again: bool
    reads: dict[str, Copy]
    makes: dict[str, Copy]
    ends: list[Copy] = field(default_factory=list)


def steps_of(problem: Problem, states: Sequence[State]) -> tuple[Step, ...]:
    """The schedule that the states describe."""
    runs = _Runs(problem, states).in_order()
    homes = _homes_of(problem.graph, runs)
    made = {name for run in runs for name in run.makes}
    steps: list[Step] = []
    for run, ending in zip(runs, _storages_ending(problem.graph, runs, homes), strict=True):
        overwrites = _overwrites_of(problem.graph, run, homes, ending, made)
        if run.again:
            steps.append(RecomputeOp(run.op.id, tuple(run.makes), overwrites))
        else:
            steps.append(Compute(run.op.id, overwrites))
        if run.ends:
            steps.append(Free(tuple(name for name, _ in run.ends)))
    return tuple(steps)


class _Runs:
    """Walks the graph's order and runs ops again wherever the states say that a tensor is gone."""

    def __init__(self, problem: Problem, states: Sequence[State]) -> None:
        self._problem, self._graph, self._states = problem, problem.graph, states
        self._gaps = gaps_of(problem)
        self._tensors_of = _tensors_by_value(problem)
        self._maker = {name: op for op in self._graph.ops for name in op.writes()}
        self._position = {op.id: position for position, op in enumerate(self._graph.ops)}
        self._there = {name for name in self._graph.tensors if name not in self._maker}
        self._copies = {name: (name, 0) for name in self._graph.tensors}
        self._runs: list[_Run] = []

    def in_order(self) -> list[_Run]:
        for position, op in enumerate(self._graph.ops):
            remade: set[int] = set()
            for missing, outputs in self._chain_of([*op.reads(), *self._wanted_ahead(position)]):
                self._run(missing, outputs, again=True)
                remade.update(self._problem.writes[self._position[missing.id]])
            self._run(op, [use.tensor for use in op.outputs], again=False)
            used = {*self._problem.reads[position], *self._problem.writes[position]}
            for value in used | remade:
                if not self._stays(value, position, made_for_others=value not in used):
                    self._there.difference_update(self._tensors_of[value])
        return self._runs

    def _stays(self, value: int, position: int, *, made_for_others: bool) -> bool:
        """Whether the states leave the value in memory after `position`."""
        state = self._state_at(value, position if made_for_others else position + 1)
        ahead = state is State.AHEAD and value in self._next_reads(position)
        return state is State.KEEP or ahead or (made_for_others and state is State.HOLD)

    def _state_at(self, value: int, position: int) -> State:
        if not self._problem.droppable[value]:
            return State.KEEP
        return self._states[self._gaps.at(value, position)]

    def _next_reads(self, position: int) -> tuple[int, ...]:
        return self._problem.reads[position + 1] if position + 1 < len(self._problem.reads) else ()

    def _wanted_ahead(self, position: int) -> list[str]:
        """The inputs of the next op that are recomputed before this one."""
        ahead = {
            name
            for value in self._next_reads(position)
            if self._state_at(value, position + 1) is State.AHEAD
            and self._problem.producer[value] != position
            for name in self._tensors_of[value]
        }
        if not ahead:
            return []
        reads = self._graph.ops[position + 1].reads()
        return [name for name in reads if name in ahead and self._position[self._maker[name].id] < position]

    def _chain_of(self, names: list[str]) -> list[tuple[Op, list[str]]]:
        """The ops to recompute for these tensors, in forward order, each with the outputs that are wanted."""
        wanted: dict[str, list[str]] = {}
        missing = [name for name in dict.fromkeys(names) if name not in self._there]
        seen = set(missing)
        while missing:
            name = missing.pop()
            maker = self._maker[name]
            wanted.setdefault(maker.id, []).append(name)
            for read in maker.reads():
                if read not in self._there and read not in seen:
                    seen.add(read)
                    missing.append(read)
        chain = sorted(wanted, key=self._position.__getitem__)
        return [(self._graph.ops[self._position[again]], sorted(wanted[again])) for again in chain]

    def _run(self, op: Op, outputs: list[str], *, again: bool) -> None:
        reads = {name: self._copies[name] for name in (*op.reads(), *added_by(op))}
        makes = {}
        for name in outputs:
            if name not in added_by(op):
                copy = (name, self._copies[name][1] + 1)
                makes[name] = self._copies[name] = copy
            self._there.add(name)
        self._runs.append(_Run(op, again, reads, makes))


def _tensors_by_value(problem: Problem) -> list[list[str]]:
    graph = problem.graph
    value_of = {owner: value for value, owner in enumerate(problem.owners)}
    tensors: list[list[str]] = [[] for _ in problem.owners]
    for name in storages_of(graph).number_of:
        if (value := value_of.get(graph.storage_of(name))) is not None:
            tensors[value].append(name)
    return tensors


def _homes_of(graph: Graph, runs: list[_Run]) -> dict[Copy, Copy]:
    """By copy: the copy that owns its storage. A view lives where what it was made of does."""
    number_of = storages_of(graph).number_of
    homes: dict[Copy, Copy] = {(name, 0): (name, 0) for name in graph.tensors}
    for run in runs:
        for name, copy in run.makes.items():
            if graph.tensors[name].alias_of is None:
                homes[copy] = copy
            else:
                viewed = [read for base, read in run.reads.items() if number_of[base] == number_of[name]]
                homes[copy] = homes[viewed[0]] if viewed else (graph.storage_of(name), 0)
    return homes


def _storages_ending(graph: Graph, runs: list[_Run], homes: dict[Copy, Copy]) -> list[set[Copy]]:
    """By run, the storages that no later run uses. Also records at each run the copies that end with it."""
    last: dict[Copy, int] = {}
    for index, run in enumerate(runs):
        for copy in (*run.reads.values(), *run.makes.values()):
            last[copy] = index
    newest = {name: (name, number) for name, number in sorted(last)}
    storage_last: dict[Copy, int] = {}
    for copy, index in last.items():
        stays = _stays(graph, copy, newest)
        if not stays:
            runs[index].ends.append(copy)
        storage_last[homes[copy]] = max(storage_last.get(homes[copy], 0), len(runs) if stays else index)
    ending: list[set[Copy]] = [set() for _ in range(len(runs) + 1)]
    for home, index in storage_last.items():
        ending[index].add(home)
    return ending[:-1]


def _stays(graph: Graph, copy: Copy, newest: dict[str, Copy]) -> bool:
    name = copy[0]
    return is_resident(graph.tensors[name]) or (name in graph.held and newest[name] == copy)


def _overwrites_of(
    graph: Graph, run: _Run, homes: dict[Copy, Copy], ending: set[Copy], made: set[str]
) -> tuple[tuple[str, str], ...]:
    """Pair outputs with inputs whose storage ends at this run, each storage at most once."""
    site = site_of(graph, run.op)
    pairs: list[tuple[str, str]] = []
    left = ending - {homes[copy] for copy in run.makes.values()}
    for output, inputs in overwritable(graph, site, made):
        for victim in inputs:
            home = homes[run.reads[victim]]
            if output in run.makes and home in left:
                left.discard(home)
                pairs.append((output, victim))
                break
    return tuple(pairs)
