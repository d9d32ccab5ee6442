"""Draws the map of a tiled segment."""

from collections.abc import Sequence

from stowplan.ops.effects import macs_of
from stowplan.ops.table import shape_of, site_of
from stowplan.plan.tile_map import Shape, TileLevel, TileMap
from stowplan.techniques.tiles.plan.costs import SweepCosts
from stowplan.techniques.tiles.plan.cutout import segment_text
from stowplan.techniques.tiles.plan.rematerialise import RematerialisedInputs
from stowplan.techniques.tiles.plan.rounds import Round, rounds_of
from stowplan.techniques.tiles.plan.segment import Segment


def tile_map_of(
    segment: Segment,
    parts: Sequence[int],
    costs: SweepCosts,
    *,
    sweep: str,
    extra_macs: int,
    remat: RematerialisedInputs | None = None,
) -> TileMap:
    """The map of a segment on a grid that fits it; `sweep` is the op that runs it."""
    return TileMap(
        sweep=sweep,
        parts=tuple(parts),
        tiles=costs.tiles,
        levels=tuple(_levels(segment, rounds_of(segment, parts), costs)),
        halo_share=costs.halo_share,
        extra_macs=extra_macs,
        backward_peak_bytes=costs.backward_peak_bytes,
        made_of=remat.kept if remat else (),
        made_whole=remat.at_once.outputs if remat and remat.at_once else (),
        text=segment_text(segment),
    )


def _levels(segment: Segment, rounds: Sequence[Round], costs: SweepCosts) -> list[TileLevel]:
    graph, largest = segment.graph, dict[str, Shape]()
    for tile, _ in (kind for each in rounds for kind in each.tiles.kinds):
        for name, rect in tile.held.items():
            largest[name] = tuple(map(max, rect.shape, largest.get(name, rect.shape)))
    return [
        TileLevel(
            op.id,
            tensor=(made := op.outputs[0].tensor),
            whole=shape_of(graph.tensors[made]),
            part=largest.get(made, ()),
            work=costs.work[op.id],
            macs=macs_of(site_of(graph, op)),
        )
        for op in segment.ops
    ]
