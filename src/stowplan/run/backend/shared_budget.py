"""One budget for the graphs of one step, into which graph breaks split a model.

When a sequence of graphs runs for the first time, its later graphs are unknown. Each graph therefore uses its
smallest plan, unless it is a whole step: it returns a loss and no graph ran before it. After the step the
sequence is known, and from the next step on its graphs are planned together: they begin at their smallest
plans and move to faster ones, always the move that saves the most seconds per byte, while all stay within the
budget. A graph of several sequences uses the smallest of the plans that they leave to it.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from torch import Tensor

from stowplan.errors import BudgetTooSmall
from stowplan.ir.labels import Labels
from stowplan.plan.judge.simulate import alive_at
from stowplan.plan.plan import Plan
from stowplan.run.backend.budgeted_graph import BudgetedGraph
from stowplan.run.backend.frontier_plans import FrontierPlans, PlannedPoint
from stowplan.run.backend.graph_run import GraphRun, PlannedRun, most_bytes
from stowplan.run.backend.step_memory import StepMemory
from stowplan.units import format_bytes


class SharedBudget:
    """Gives each graph of a step a plan, one after the other."""

    def __init__(self, allowed_bytes: int) -> None:
        self.allowed_bytes = allowed_bytes
        self._memory = StepMemory()
        self._known: set[tuple[BudgetedGraph, ...]] = set()

    @property
    def plans(self) -> Sequence[Plan]:
        """The plans of the current step, or of the last one."""
        return self._memory.plans

    def begin(self, graph: BudgetedGraph, inputs: Sequence[Tensor], wanted: Iterable[Tensor]) -> PlannedRun:
        """The plan to run `graph` with now. `wanted` are the inputs whose gradients stay after the run."""
        if not self._memory.waiting:
            self._learn_from(self._memory)
            self._memory = StepMemory()
        return self._fitting_run(self._memory.about_to_run(graph, inputs, wanted))

    def opened(self, planned: PlannedRun, results: Iterable[Tensor]) -> StepMemory:
        """The run's forward is done. Returns the step memory, which must learn when its backward is done."""
        self._memory.opened(planned, results)
        return self._memory

    def _learn_from(self, step: StepMemory) -> None:
        graphs = tuple(run.graph for run in step.sequence)
        if graphs and graphs not in self._known:
            for graph, index in self._indices(step).items():
                graph.learn(index, is_followed=graph in graphs[:-1])
            self._known.add(graphs)

    def _fitting_run(self, run: GraphRun) -> PlannedRun:
        """The run with the point that the graph may use, or with the next smaller one that fits now."""
        for point in self._points_down(run):
            planned = PlannedRun(run, point)
            if max(self._memory.needed_bytes(planned)) <= self.allowed_bytes:
                return planned
        raise self._too_small(planned)

    def _points_down(self, run: GraphRun) -> Iterator[PlannedPoint]:
        for index in range(self._index(run), -1, -1):
            yield run.graph.point(index)
        yield run.graph.smallest()

    def _index(self, run: GraphRun) -> int:
        """The point that a graph may use. A graph with none before and none after it is a whole step."""
        graph = run.graph
        if graph.is_known or graph.is_followed or self._memory.waiting:
            return graph.index
        return graph.plans(is_followed=False).index_within(self._memory.room_bytes(run, self.allowed_bytes))

    def _indices(self, step: StepMemory) -> dict[BudgetedGraph, int]:
        """The point of each graph after as many moves to faster plans as fit, the largest gains first.

        The order of the moves does not depend on the budget, so a larger budget allows more of them.
        """
        moves = _moves(step.sequence)
        counts = range(1, len(moves) + 1)
        taken = bisect_left(counts, True, key=lambda n: not self._fits(step, Counter(moves[:n])))
        indices = Counter(moves[:taken])
        return {run.graph: indices[run.graph] for run in step.sequence}

    def _fits(self, step: StepMemory, indices: Counter[BudgetedGraph]) -> bool:
        """Whether each run is within the budget, with everything that the other runs hold meanwhile."""
        planned_runs = [
            PlannedRun(run, _plans_in(step.sequence, run.graph).point(indices[run.graph]))
            for run in step.sequence
        ]
        return max(most_bytes(planned_runs, step.standing_bytes)) <= self.allowed_bytes

    def _too_small(self, newcomer: PlannedRun) -> BudgetTooSmall:
        needed = self._memory.needed_bytes(newcomer)
        planned = [*self._memory.waiting, newcomer][int(np.argmax(needed))]
        plan, own = planned.point.plan, planned.point.peak_bytes
        binding = alive_at(plan.graph, plan.steps, int(np.argmax(plan.projected_curve_bytes)))
        return BudgetTooSmall(
            f"{format_bytes(self.allowed_bytes)} allowed for all graphs of the step, but at least"
            f" {format_bytes(max(needed))} ({max(needed)} bytes) needed: {format_bytes(own)} by a graph that"
            f" binds through {Labels(plan.graph).largest(binding)};"
            f" {format_bytes(max(needed) - own)} are held by others then",
            allowed_bytes=self.allowed_bytes,
            minimum_bytes=max(needed),
            binding=binding,
        )


def _plans_in(sequence: Sequence[GraphRun], graph: BudgetedGraph) -> FrontierPlans:
    return graph.plans(is_followed=any(run.graph is graph for run in sequence[:-1]))


def _moves(sequence: Sequence[GraphRun]) -> list[BudgetedGraph]:
    """All moves from one point to the next, by the graph that moves, the largest gains first."""
    graphs = dict.fromkeys(run.graph for run in sequence)
    steps = [(gain, graph) for graph in graphs for gain in _plans_in(sequence, graph).gains]
    return [graph for _, graph in sorted(steps, key=lambda step: -step[0])]
