"""Tiled candidates for a graph that cannot be run: segments collapsed into sweeps, priced by region rules."""

from collections.abc import Callable, Iterator
from functools import partial

from stowplan.errors import NotTileable
from stowplan.ir import Graph
from stowplan.plan.options import PlanOptions
from stowplan.plan.pricing import Pricing
from stowplan.plan.select import Baseline, Candidate, Refusals
from stowplan.plan.steps import Decision
from stowplan.plan.tile_map import TileMap, tiled_inside
from stowplan.techniques.tiles.plan.candidates import Tiling, stage_tilings, whole_tilings
from stowplan.techniques.tiles.plan.collapse import Collapsed, collapse, name_of_sweep
from stowplan.techniques.tiles.plan.mapping import tile_map_of
from stowplan.techniques.tiles.plan.segment import WHOLE_STEP, segment_of, stretch_named
from stowplan.techniques.tiles.plan.sweeps import GraphWithSweeps, Sweeps, with_moves


def stage_candidates(
    graph: Graph,
    pricing: Pricing,
    step: Baseline,
    options: PlanOptions,
    refusals: Refusals,
) -> Iterator[Candidate]:
    """Some stages of the forward half in tiles, from the one that holds most to all."""
    for tiling in stage_tilings(graph, refusals):
        try:
            yield _candidate(graph, pricing, step, tiling, options)
        except NotTileable as refusal:  # something outside reads what would be inside
            refusals.add(_stretches(tiling)[0], refusal)


def whole_candidates(
    graph: Graph,
    pricing: Pricing,
    step: Baseline,
    options: PlanOptions,
    refusals: Refusals,
) -> Iterator[Candidate]:
    """All of the forward half in one sweep up to its loss, on some grids."""
    for tiled in whole_tilings(graph, refusals):
        try:
            yield _candidate(graph, pricing, step, (tiled,), options)
        except NotTileable as refusal:
            refusals.add(WHOLE_STEP, refusal)


def _stretches(tiling: Tiling) -> tuple[str, ...]:
    return tuple(stretch_named(tiled.segment.ops) for tiled in tiling)


def _candidate(
    graph: Graph,
    pricing: Pricing,
    step: Baseline,
    tiling: Tiling,
    options: PlanOptions,
) -> Candidate:
    """The graph with all segments of a tiling collapsed, one after the other."""
    collapsed, extra = Collapsed(graph, pricing, 0), 0
    decisions: dict[str, Decision] = {}
    macs: dict[str, int] = {}
    drawn: list[Callable[[], TileMap]] = []
    for tiled in tiling:
        segment = segment_of(collapsed.graph, [op.id for op in (*tiled.segment.ops, *tiled.segment.apart)])
        sweep = name_of_sweep(segment)
        decisions |= tiled_inside(sweep, tiled.parts, segment.inside)
        collapsed = collapse(segment, tiled.costs, collapsed.pricing)
        extra += collapsed.extra_macs
        macs[sweep] = tiled.costs.forward_macs
        draw = partial(tile_map_of, segment, tiled.parts, tiled.costs)
        drawn.append(partial(draw, sweep=sweep, extra_macs=collapsed.extra_macs))
    sweeps = Sweeps(decisions, extra, lambda: tuple(draw() for draw in drawn), macs, _stretches(tiling))
    limited = with_moves(options, collapsed.graph)
    return GraphWithSweeps(collapsed.graph, collapsed.pricing, step, limited, sweeps)
