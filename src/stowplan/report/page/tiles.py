"""The data of the tile view: each tile of a schedule, or of a plan's sweeps, level by level with its cost."""

from collections.abc import Iterator, Sequence

from stowplan.analyse.tile_costs import Read, TileOp, backward_levels, forward_levels, tile_costs_of
from stowplan.geometry import Point, Rect
from stowplan.ir import Document, TileSchedule
from stowplan.plan.plan import Plan
from stowplan.plan.tile_map import TILE_LEVELS, TileMap
from stowplan.report.page.columns import Columns
from stowplan.report.page.subject import PageSubject
from stowplan.units import format_bytes, format_count

_EXACT = 1_000_000  # from here on three digits are enough
_MOST_LEVELS = 20_000  # more are megabytes that nobody looks at


def tilings_of(subject: PageSubject) -> list[Columns]:
    """Everything of a subject that is computed tile by tile."""
    if subject.plan:
        return [_of_map(subject.plan, tiled, name) for name, tiled in _named(subject.plan.tile_maps)]
    schedule = subject.document.tiles if subject.document else None
    if subject.document is None or schedule is None or not (schedule.forward or schedule.backward):
        return []
    return [_of_schedule(subject.document, schedule)]


def _named(maps: Sequence[TileMap], *, within: bool = False) -> Iterator[tuple[str, TileMap]]:
    """Maps and those within them; an inner sweep may begin with the same op as the one around it."""
    for tiled in maps:
        if tiled.text:
            yield f"{tiled.sweep}, inner" if within else tiled.sweep, tiled
        yield from _named(tiled.within, within=True)


def _of_map(plan: Plan, tiled: TileMap, name: str) -> Columns:
    """A sweep of a plan. Backward recomputes each tile and differentiates it, on the same rects."""
    levels = TILE_LEVELS.of("tile")(tiled, max(1, _MOST_LEVELS // max(1, len(tiled.levels))))
    macs = round(sum(level.macs * level.work for level in tiled.levels))
    untiled = sum(level.macs for level in tiled.levels)
    largest = format_bytes(tiled.backward_peak_bytes)
    return {
        "name": name,
        "sweeps": [
            number
            for number, op in enumerate(plan.graph.ops)
            if tiled.sweep in (op.id, op.adjoint_of, op.attributes.get("name"))
        ],
        "grid": tiled.parts,
        "tiles": [_tile(place, found, ()) for place, found in levels.items()],
        "cost": f"{_work(tiled.tiles, macs, untiled)}; the largest takes {largest} to run and differentiate.",
    }


def _of_schedule(document: Document, schedule: TileSchedule) -> Columns:
    graph = document.graph
    costs = tile_costs_of(graph, schedule)
    forward, backward = forward_levels(graph, schedule), backward_levels(graph, schedule)
    order = dict.fromkeys((*schedule.forward, *schedule.backward))  # as the forward half runs them
    return {
        "name": "",
        "sweeps": [],
        "grid": schedule.grid,
        "tiles": [
            _tile(place, forward.get(place, ())[::-1], backward.get(place, ())[::-1]) for place in order
        ],
        "cost": f"{_work(len(order), costs.forward_macs, costs.untiled_macs)}; "
        f"{costs.writes:,} writes for {costs.cells:,} cells.",
    }


def _work(tiles: int, macs: int, untiled_macs: int) -> str:
    ratio = f" ({macs / untiled_macs:.2f} x)" if untiled_macs else ""
    return f"All {tiles:,} tiles: {_count(macs)} against {_count(untiled_macs)} untiled{ratio}"


def _count(macs: int) -> str:
    return f"{macs:,}" if macs < _EXACT else format_count(macs)


def _tile(place: Point, forward: Sequence[TileOp], backward: Sequence[TileOp]) -> Columns:
    """The levels of a tile in the order in which data flows through it."""
    return {"at": place, "forward": list(map(_level, forward)), "backward": list(map(_level, backward))}


def _level(level: TileOp) -> Columns:
    return {
        "op": level.op,
        "made_shape": level.made_shape,
        "made": box(level.made),
        "reads": [_read(read) for read in level.reads],
        "halo": level.halo_cells,
        "macs": level.macs,
    }


def _read(read: Read) -> Columns:
    return {
        "shape": read.shape,
        "wanted": box(read.wanted),
        "inside": box(read.inside),
        "owned": box(read.owned) if read.owned else None,
    }


def box(rect: Rect) -> list[tuple[int, ...]]:
    """A rectangle as its two corners."""
    return [rect.lo, rect.hi]
