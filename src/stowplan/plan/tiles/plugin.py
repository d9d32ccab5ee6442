"""Tiles plug in here: candidates for a graph of which nothing but its file is known, and tiles to look at.

Sweeps are priced by the region algebra.
"""

from collections.abc import Iterator

from stowplan.ir import Graph, Phase
from stowplan.plan.options import PlanOptions
from stowplan.plan.pricing import Pricing
from stowplan.plan.select import GRAPH_CANDIDATES, Baseline, Candidate, Refusals
from stowplan.plan.tile_map import DOCUMENT_TILES, TILE_LEVELS
from stowplan.plan.tiles.borders import in_tiling_order
from stowplan.plan.tiles.by_sample import sample_candidates
from stowplan.plan.tiles.collapsed import stage_candidates, whole_candidates
from stowplan.plan.tiles.file_tiles import tiles_for_document
from stowplan.plan.tiles.levels import levels_of

TILE_LEVELS.register("tile")(levels_of)
DOCUMENT_TILES.register("tile")(tiles_for_document)


@GRAPH_CANDIDATES.register("tile")
def graph_candidates(
    graph: Graph, pricing: Pricing, baseline: Baseline, options: PlanOptions, refusals: Refusals
) -> Iterator[Candidate]:
    """The whole step in tiles, then sample by sample, else stage by stage."""
    if any(op.phase is Phase.BACKWARD for op in graph.ops):
        early = in_tiling_order(graph)
        yield from whole_candidates(early, pricing, baseline, options, refusals)
        by_sample = tuple(sample_candidates(early, pricing, baseline, options, refusals))
        yield from by_sample or stage_candidates(early, pricing, baseline, options, refusals)
