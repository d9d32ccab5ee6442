"""One budget for the graphs of one step, into which graph breaks split a model.

When a sequence of graphs runs for the first time, its later graphs are unknown. Each graph therefore uses its
smallest plan, unless it is a whole step: it returns a loss and no graph ran before it. After the step the
sequence is known, and from the next step on its graphs are planned together: they begin at their smallest
plans and move to faster ones, always the move that saves the most seconds per byte, while all stay within the
budget. A graph of several sequences uses the smallest of the plans that they leave to it.

Step memory: the bytes that all graph runs of the current step hold together.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from torch import Tensor

from stowplan.errors import BudgetTooSmall
from stowplan.ir.text import Labels
from stowplan.plan.judge.simulate import alive_at
from stowplan.plan.plan import Plan
from stowplan.run.backend.budgeted_graph import BudgetedGraph
from stowplan.run.backend.frontier_plans import FrontierPlans, PlannedPoint
from stowplan.run.backend.graph_run import GraphRun, PlannedRun, most_bytes
from stowplan.run.measure.living import LivingStorages
from stowplan.units import format_bytes


class StepMemory:
    """The graph runs of one step. The step is over when no run waits for its backward."""

    def __init__(self) -> None:
        self.waiting: dict[PlannedRun, None] = {}  # in running order
        self.sequence: list[GraphRun] = []
        self.plans: list[Plan] = []
        self.standing_bytes = 0  # the most so far of parameters, buffers and inputs
        self._standing = LivingStorages()
        self._left_bytes = 0  # by runs that are closed
        self._latest: PlannedRun | None = None  # of those

    def about_to_run(
        self, graph: BudgetedGraph, inputs: Sequence[Tensor], wanted: Iterable[Tensor]
    ) -> GraphRun:
        """Count the inputs of a graph that is about to run. `wanted` are the inputs whose gradients stay."""
        made = [planned.results for planned in self.waiting]
        self._standing.add(tensor for tensor in inputs if not any(tensor in results for results in made))
        self.standing_bytes = max(self.standing_bytes, self._standing.nbytes)
        return GraphRun(
            graph,
            own_bytes=self._standing.bytes_among(inputs),
            handed_bytes=sum(results.bytes_among(inputs) for results in made),
            gradient_bytes=sum(tensor.nbytes for tensor in wanted),
        )

    def room_bytes(self, run: GraphRun, allowed_bytes: int) -> int:
        """The bytes that are left for a graph after the inputs of the other graphs."""
        return allowed_bytes - self._standing.nbytes + run.own_bytes

    def needed_bytes(self, newcomer: PlannedRun) -> list[int]:
        """The bytes at the peak of each run that waits for its backward, and of one more run."""
        return list(most_bytes([*self.waiting, newcomer], self._standing.nbytes + self._left_bytes))

    def opened(self, planned: PlannedRun, results: Iterable[Tensor]) -> None:
        """The run's forward is done; the bytes that it keeps count until the run is closed or dropped."""
        planned.results.add(tensor for tensor in results if tensor not in self._standing)
        self.waiting[planned] = None
        self.sequence.append(planned.run)
        self.plans.append(planned.point.plan)

    def turned(self) -> None:
        """A backward begins. Results of the previous run that are still alive are held by the caller."""
        if self._latest:
            graph, held = self._latest.run.graph, self._latest.results.nbytes
            graph.lingering_bytes = max(graph.lingering_bytes, held)
            self._left_bytes += held
            self._latest = None

    def closed(self, planned: PlannedRun) -> None:
        """The run's backward is done."""
        if planned in self.waiting:
            self._left_bytes += planned.run.gradient_bytes
            self._latest = planned
            self.dropped(planned)

    def dropped(self, planned: PlannedRun) -> None:
        """The run's backward will not come."""
        self.waiting.pop(planned, None)


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
