"""Sweeps of a graph: what they decide, and how a plan with them is compared with the baseline."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from stowplan.ir import Graph
from stowplan.plan.draft import Draft, Exactness
from stowplan.plan.options import PlanOptions
from stowplan.plan.pricing import Pricing
from stowplan.plan.select import Baseline, GraphCandidate, Tradeoff, tradeoffs_of
from stowplan.plan.steps import Decision, RecomputeOp
from stowplan.plan.tile_map import TileMap

_FEWEST, _MOST, _BY_OP = 12_000, 80_000, 100  # moves of a search, and how many an op is worth


def with_moves(options: PlanOptions, graph: Graph) -> PlanOptions:
    """Few moves for one of many candidates, since sweeps make most graphs small; more for many ops."""
    moves = min(_MOST, max(_FEWEST, _BY_OP * len(graph.ops)))
    if options.search.moves is not None:
        return options
    return replace(options, search=replace(options.search, moves=moves))


@dataclass(frozen=True, slots=True)
class Sweeps:
    """The sweeps of a graph: what they decide, the work they add, how to draw their maps, their stretches.

    There may be sweeps and no decisions: nothing is inside of one that has a loss alone.
    """

    decisions: Mapping[str, Decision]
    extra_macs: int
    maps: Callable[[], tuple[TileMap, ...]]
    macs: Mapping[str, int] = field(default_factory=dict)  # by sweep: of running it once more
    stretches: tuple[str, ...] = ()

    def told(self, draft: Draft, baseline: Baseline) -> Draft:
        """A draft for the graph with the sweeps, compared with the baseline."""
        again = (self.macs.get(step.op, 0) for step in draft.steps if isinstance(step, RecomputeOp))
        return replace(
            draft,
            decisions={**draft.decisions, **self.decisions},
            plain_peak_bytes=baseline.peak_bytes,
            plain_seconds=baseline.seconds,
            bound_seconds=min(baseline.seconds, draft.bound_seconds),
            extra_macs=draft.extra_macs + self.extra_macs + sum(again),
            tile_maps=self.maps(),
        )


class GraphWithSweeps(GraphCandidate):
    """A graph in which sweeps replace some of the segments."""

    def __init__(
        self, graph: Graph, pricing: Pricing, baseline: Baseline, options: PlanOptions, sweeps: Sweeps
    ) -> None:
        super().__init__(graph, pricing, baseline, options)
        self._sweeps = sweeps

    @property
    def stretches(self) -> tuple[str, ...]:
        return self._sweeps.stretches

    def told(self, draft: Draft) -> Draft:
        return self._sweeps.told(draft, self.baseline)

    def tradeoffs(self) -> tuple[Tradeoff, ...]:
        return tradeoffs_of(self.planner, Exactness.ROUNDING)
