"""From one state per gap to the list of steps: what runs when, what is overwritten, what is freed.

Three passes: find the runs (every op once, and again where a tensor is missing), find each copy's last
reader, then write the steps with every free right behind it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from stowplan.analyse.facts import is_resident, storages_of
from stowplan.ir import Graph, Op, Role
from stowplan.ops.table import site_of
from stowplan.plan.ledger import State, gaps_of
from stowplan.plan.plan import Compute, Free, RecomputeOp, Step
from stowplan.plan.problem import Problem, overwritable

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
        reads = {name: self._copies[name] for name in (*op.reads(), *_added(op))}
        makes = {}
        for name in outputs:
            if name not in _added(op):
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


def _added(op: Op) -> tuple[str, ...]:
    return tuple(use.tensor for use in op.outputs if use.role is Role.ACCUMULATE)


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
