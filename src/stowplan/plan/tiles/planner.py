"""The planner of a graph of which nothing but its file is known: sweeps are priced by the region algebra."""

from collections.abc import Iterable, Iterator

from stowplan.ir import Graph, Phase
from stowplan.plan.candidate import GraphWay, PlainStep, Way
from stowplan.plan.planner import TECHNIQUES, known_techniques, plain_peak_of, refuse_without_ops
from stowplan.plan.pricing import Pricing
from stowplan.plan.select import MasterPlanner, Prefer
from stowplan.plan.tiles.borders import in_tiling_order
from stowplan.plan.tiles.collapsed_ways import stage_ways, whole_ways
from stowplan.plan.tiles.sample_way import sample_ways
from stowplan.plan.untiled import Untiled


def planner_of(
    graph: Graph,
    pricing: Pricing,
    *,
    allow: Iterable[str] = TECHNIQUES,
    prefer: Prefer = Prefer.EXACTNESS,
    moves: int | None = None,
) -> MasterPlanner[Way]:
    """The master problem of a graph; frontiers are searched when a budget first asks for them."""
    allowed = known_techniques(allow)
    refuse_without_ops(graph)
    step = PlainStep(sum(pricing.seconds[op.id] for op in graph.ops), plain_peak_of(graph, pricing))
    plain: Way = GraphWay(graph, pricing, step, allow=allowed, moves=moves)

    def find_ways(untiled: Untiled) -> Iterator[Way]:
        if "tile" in allowed and any(op.phase is Phase.BACKWARD for op in graph.ops):
            early = in_tiling_order(graph)
            yield from whole_ways(early, pricing, step, untiled, allow=allowed, moves=moves)
            by_sample = tuple(sample_ways(early, pricing, step, untiled, allow=allowed, moves=moves))
            yield from by_sample or stage_ways(early, pricing, step, untiled, allow=allowed, moves=moves)

    return MasterPlanner(plain, step, find_ways, prefer)
