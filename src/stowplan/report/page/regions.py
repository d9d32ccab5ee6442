"""The data of the tile view: a schedule level by level, or the rectangles that a worker reads and writes."""

from stowplan.analyse.tile_costs import tile_costs_of
from stowplan.analyse.tile_levels import Level, backward_levels, forward_levels
from stowplan.geometry import Rect
from stowplan.ir import Document, Graph, Regions, TileSchedule
from stowplan.report.page.columns import Columns


def tiles_of(document: Document) -> Columns | None:
    """Every tile with its levels in both halves, in the order in which data flows through it."""
    schedule = document.tiles
    if schedule is None or not (schedule.forward or schedule.backward):
        return None
    graph = document.graph
    costs = tile_costs_of(graph, schedule)
    forward, backward = forward_levels(graph, schedule), backward_levels(graph, schedule)
    position = {op.id: number for number, op in enumerate(graph.ops)}
    return {
        "grid": schedule.grid,
        "tiles": [
            {
                "at": tile,
                "forward": [_level(level, position) for level in reversed(forward.get(tile, ()))],
                "backward": [_level(level, position) for level in reversed(backward.get(tile, ()))],
            }
            for tile in _in_order(schedule)
        ],
        "macs": costs.forward_macs,
        "untiled_macs": costs.untiled_macs,
        "writes": costs.writes,
        "cells": costs.cells,
    }


def _in_order(schedule: TileSchedule) -> tuple[tuple[int, ...], ...]:
    """Every tile once, as the forward half runs them, then those that only the backward half has."""
    return tuple(dict.fromkeys((*schedule.forward, *schedule.backward)))


def _level(level: Level, position: dict[str, int]) -> Columns:
    return {
        "op": position[level.op],
        "made_shape": level.made_shape,
        "read_shape": level.read_shape,
        "made": _box(level.made),
        "wanted": _box(level.wanted),
        "inside": _box(level.inside),
        "owned": _box(level.owned),
        "halo": level.halo_cells,
        "macs": level.macs,
    }


def _box(rect: Rect) -> list[tuple[int, ...]]:
    return [rect.lo, rect.hi]


def regions_of(document: Document) -> Columns | None:
    """Per tensor what the worker reads and writes, per op the rectangle of each port."""
    regions = document.regions
    if regions is None:
        return None
    return {
        "tensors": _by_number(document.graph, regions),
        "ops": [
            [[port, _box(rect)] for port, rect in regions.ops.get(op.id, {}).items()]
            for op in document.graph.ops
        ],
    }


def _by_number(graph: Graph, regions: Regions) -> list[Columns | None]:
    found: list[Columns | None] = []
    for name, tensor in graph.tensors.items():
        region = regions.tensors.get(name)
        found.append(
            {
                "shape": tensor.shape,
                "read": _box(region.read) if region.read else None,
                "write": _box(region.write) if region.write else None,
            }
            if region
            else None
        )
    return found
