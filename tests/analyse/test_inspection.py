"""What an inspection adds to the facts of a graph."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given

from stowplan.analyse.inspection import inspection_of
from stowplan.errors import InvalidGraph
from stowplan.geometry import Point, Rect
from stowplan.ir import Document, Graph, Interval, Phase, Profile, TileSchedule, TileStep
from tests.support.graphs import legal_graphs
from tests.support.steps import training_step


@given(legal_graphs(sized=True))
@pytest.mark.slow
def test_one_peak_bounds_another(graph: Graph) -> None:
    inspection = inspection_of(Document("stow", graph))
    facts = inspection.facts
    assert inspection.in_place_peak_bytes <= facts.peak.bytes
    assert facts.lower_bound_bytes <= facts.peak.bytes
    assert inspection.packing is not None
    assert inspection.packing.max_live_bytes == facts.peak.bytes <= inspection.packing.arena_bytes
    has_layout = any(op.phase is Phase.LAYOUT for op in graph.ops)
    assert (inspection.without_layout_peak_bytes is None) == (not has_layout)


def test_times_are_sorted_and_summed() -> None:
    graph = training_step(8)
    ops = [op for op in graph.ops if op.phase is Phase.FORWARD][:3]
    intervals = {op.id: Interval(i, i + 1, 4 * i + 1) for i, op in enumerate(ops)}
    times = inspection_of(Document("stow", graph, Profile({"host": intervals, "idle": {}}))).times
    assert list(times) == ["host"]
    assert times["host"].span_seconds == 9
    assert dict(times["host"].seconds_by_op) == {ops[2].id: 6, ops[1].id: 3, ops[0].id: 0}
    assert list(times["host"].seconds_by_type) == [ops[2].type, ops[1].type, ops[0].type]


def test_tiles_that_overlap_cost_more() -> None:
    graph = training_step(8)
    conv, halves = graph.ops[0], Rect.of_shape((32, 32)).split((2, 1))
    whole = Document("stow", graph, tiles=schedule_of(conv.id, halves))
    grown = [Rect(half.lo, (half.hi[0], 32)).hull(Rect((8, 0), (24, 32))) for half in halves]
    cut, overlapping = (
        inspection_of(d).tile_costs for d in (whole, replace(whole, tiles=schedule_of(conv.id, grown)))
    )
    assert cut is not None
    assert overlapping is not None
    assert cut.forward_macs == cut.untiled_macs == overlapping.untiled_macs > 0
    assert (cut.tiles, cut.writes, cut.cells) == (2, 1024, 1024)
    assert overlapping.forward_macs / cut.forward_macs == overlapping.writes / 1024 == 1.5


def schedule_of(op: str, results: Sequence[Rect]) -> TileSchedule:
    """One forward step per tile, in a column of tiles."""
    tiles: dict[Point, tuple[TileStep, ...]] = {
        (i, 0): (TileStep(op, rect, rect, rect),) for i, rect in enumerate(results)
    }
    return TileSchedule((len(results), 1), tiles, {})


def test_a_tile_of_an_unknown_op_is_refused() -> None:
    tiles = schedule_of("nobody", [Rect.of_shape((1, 1))])
    with pytest.raises(InvalidGraph, match="a tile computes 'nobody'"):
        inspection_of(Document("stow", training_step(8), tiles=tiles))
