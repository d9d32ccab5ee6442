"""Step memory: the bytes that all graph runs of the current step hold together."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from stowplan.plan.plan import Plan
from stowplan.run.backend.budgeted_graph import BudgetedGraph
from stowplan.run.backend.graph_run import GraphRun, PlannedRun, most_bytes
from stowplan.run.backend.living import LivingStorages


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
