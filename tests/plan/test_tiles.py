"""Tiles as rectangles: what they need, what they cost, and what a graph looks like without what is inside."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from stowplan.analyse.facts import costs_of
from stowplan.analyse.tile_costs import tile_costs_of
from stowplan.errors import BadUse
from stowplan.formats.door import read_document
from stowplan.geometry import Rect, are_disjoint, covers
from stowplan.ir import Graph, Phase
from stowplan.plan.planner import baseline_peak_of
from stowplan.plan.prices import price_by_macs
from stowplan.techniques.tiles.plan.candidates import stages_of
from stowplan.techniques.tiles.plan.collapse import collapse
from stowplan.techniques.tiles.plan.costs import costs_of_sweep
from stowplan.techniques.tiles.plan.rects import TileLevels, grid_of, regions_by_op, tile_of, tiles_of
from stowplan.techniques.tiles.plan.rounds import refusal, rounds_of
from stowplan.techniques.tiles.plan.segment import Segment, segment_of

Dump = Callable[[str], Path]
MIB = 2**20


def forward_of(graph: Graph) -> list[str]:
    return [op.id for op in graph.ops if op.phase is Phase.FORWARD]


@pytest.fixture(scope="module")
def unet(dump: Dump) -> Segment:
    """All of the U-Net's forward half, its loss included."""
    graph = read_document(dump("chainer")).graph
    return segment_of(graph, forward_of(graph))


def test_levels_are_those_of_the_document_for_its_tiles(dump: Dump) -> None:
    document = read_document(dump("tilelog"))
    schedule = document.tiles
    assert schedule is not None
    segment = segment_of(document.graph, forward_of(document.graph))
    regions = regions_by_op(segment)
    for steps in schedule.forward.values():
        last = Rect((0, 0, *steps[0].result.lo), (1, 1, *steps[0].result.hi))
        tile = tile_of(segment, {segment.outputs[0]: last}, regions)
        for level, step in zip(reversed(tile.levels), steps, strict=True):
            assert (level.made.lo[2:], level.made.hi[2:]) == (step.result.lo, step.result.hi)
            assert level.needs[0] is not None
            assert (level.needs[0].lo[2:], level.needs[0].hi[2:]) == (step.wanted.lo, step.wanted.hi)


def test_tiles_as_products_of_the_edges_of_their_grid_are_those_pulled_one_by_one(unet: Segment) -> None:
    stages = [segment_of(unet.graph, stage) for stage in stages_of(unet.graph)]
    for segment, parts in ((unet, (8, 1, 3, 2)), *((stage, (2, 1, 3, 4)) for stage in stages)):
        regions, tiles = regions_by_op(segment), list(tiles_of(segment, parts))
        assert [tile_of(segment, tile.owned, regions) for tile in tiles] == tiles
        assert all(are_disjoint(tile.owned[name] for tile in tiles) for name in tiles[0].owned)


def test_tiles_that_own_their_output_take_a_third_of_the_documents_work(dump: Dump) -> None:
    document = read_document(dump("tilelog"))
    assert document.tiles is not None
    theirs = tile_costs_of(document.graph, document.tiles)
    segment = segment_of(document.graph, forward_of(document.graph))
    ours = costs_of_sweep(segment, rounds_of(segment, (1, 1, *document.tiles.grid)))
    assert ours.untiled_macs == theirs.untiled_macs == 2880
    assert (ours.forward_macs, theirs.forward_macs) == (7632, 24336)


def test_owned_parts_partition_what_is_cut(unet: Segment) -> None:
    tiles = list(tiles_of(unet, (8, 1, 3, 2)))
    (scores, labels) = (use.tensor for use in unet.ops[-1].inputs)
    for name, shape in ((scores, (8, 2, 388, 388)), (labels, (8, 388, 388))):
        parts = [tile.owned[name] for tile in tiles]
        assert are_disjoint(parts)
        assert covers(parts, Rect.of_shape(shape))


def test_a_segment_that_reads_its_own_output_gets_it_from_inside(unet: Segment) -> None:
    """The skip that the first level hands to the last one is an output, and pooled further inside."""
    names = forward_of(unet.graph)
    segment = segment_of(unet.graph, names[: names.index("GetItem.78")])
    assert set(segment.outputs) == {"71", "93"}
    assert segment.loss is None


@pytest.mark.parametrize(
    ("parts", "peak_mib", "extra"),
    [((8, 1, 1, 1), 1183, 0.0), ((8, 1, 2, 1), 779, 0.152), ((8, 1, 2, 2), 555, 0.342)],
)
def test_the_documents_unet_in_tiles(
    unet: Segment, parts: tuple[int, ...], peak_mib: float, extra: float
) -> None:
    """Samples apart cost nothing; a cut through the image costs its halo, and spares more."""
    pricing = price_by_macs(unet.graph)
    costs = costs_of_sweep(unet, rounds_of(unet, parts))
    collapsed = collapse(unet, costs, pricing)
    assert baseline_peak_of(collapsed.graph, collapsed.pricing) <= peak_mib * MIB
    assert 0 <= collapsed.extra_macs <= extra * costs_of(unet.graph).step_macs


def test_collapsing_leaves_nothing_of_the_inside(unet: Segment) -> None:
    names = forward_of(unet.graph)
    segment = segment_of(unet.graph, names[names.index("upconv_u1d_u0a.80") : -1])
    costs = costs_of_sweep(segment, rounds_of(segment, (8, 1, 2, 2)))
    graph = collapse(segment, costs, price_by_macs(unet.graph)).graph
    assert not set(segment.inside) & graph.tensors.keys()
    backward = next(op for op in graph.ops if op.type == "stowplan.sweep_backward")
    assert {graph.tensors[name].gradient_of for name in backward.writes()} <= set(segment.inputs)
    assert "103.grad" in backward.reads()


def test_refusals_say_why(unet: Segment) -> None:
    assert "runs over dims" in refusal(unet, (1, 2, 1, 1))
    assert "cannot be cut into" in refusal(unet, (16, 1, 1, 1))
    names = forward_of(unet.graph)
    with pytest.raises(BadUse, match="consecutive ops"):
        segment_of(unet.graph, [names[0], names[2]])


@pytest.mark.parametrize("parts", [(1, 1, 1, 1), (8, 1, 3, 2), (1, 1, 1, 7), (1, 1, 5, 4)])
def test_every_tile_is_of_one_kind(unet: Segment, parts: tuple[int, ...]) -> None:
    grid = grid_of(unet, parts)
    sizes = Counter(_sizes(tile) for tile in grid)
    counted = Counter[tuple[object, ...]]()
    for tile, count in grid.kinds:
        assert tile in list(grid)
        counted[_sizes(tile)] += count
    assert counted == sizes
    assert len(grid) == sum(sizes.values())


def _sizes(tile: TileLevels) -> tuple[object, ...]:
    return *(level.made.shape for level in tile.levels), *(rect.shape for rect in tile.held.values())
