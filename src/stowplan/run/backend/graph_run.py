"""Graph run: one execution of a graph within a step, and the peak of all runs of a step together.

The runs are nested: a graph's backward comes after the backwards of all graphs that follow it. While a graph
runs, the graphs before it hold the tensors that they keep, and the graphs after it those that their backward
left.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stowplan.run.backend.budgeted_graph import BudgetedGraph
from stowplan.run.backend.frontier_plans import PlannedPoint
from stowplan.run.measure.living import LivingStorages


@dataclass(frozen=True, slots=True)
class GraphRun:
    """The bytes that a run shares with its step: inputs that no other graph made (`own_bytes`), inputs made
    by
    graphs that wait for their backward (`handed_bytes`), and the gradients that it leaves."""

    graph: BudgetedGraph
    own_bytes: int
    handed_bytes: int
    gradient_bytes: int

    @property
    def left_bytes(self) -> int:
        """The bytes that stay when its backward is done: gradients, and results that the caller holds."""
        return self.gradient_bytes + self.graph.lingering_bytes


@dataclass(frozen=True, slots=True, eq=False)
class PlannedRun:
    """A graph run, the plan that it follows, and its results while it waits for its backward."""

    run: GraphRun
    point: PlannedPoint
    results: LivingStorages = field(default_factory=LivingStorages)


def most_bytes(planned_runs: Sequence[PlannedRun], standing_bytes: int) -> Iterator[int]:
    """The peak of each of these nested runs, over its forward and its backward.

    `standing_bytes` are alive throughout the step: parameters and inputs.
    """
    kept, left = 0, sum(planned.run.left_bytes for planned in planned_runs)
    for planned in planned_runs:
        left -= planned.run.left_bytes
        outside = standing_bytes - planned.run.own_bytes + kept - planned.run.handed_bytes
        yield outside + max(planned.point.forward_bytes, planned.point.backward_bytes + left)
        kept += planned.point.kept_bytes
