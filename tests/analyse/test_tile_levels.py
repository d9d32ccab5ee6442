"""Tiles level by level: their work adds up, their cells divide each tensor, halos are what lies beyond."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stowplan.analyse.tile_costs import backward_levels, forward_levels
from stowplan.errors import InvalidGraph
from stowplan.formats.door import read_document
from stowplan.geometry import Rect, are_disjoint, covers
from stowplan.ir import Document, TileSchedule


@pytest.fixture
def document(dump: Callable[[str], Path]) -> Document:
    return read_document(dump("tilelog"))


def schedule_of(document: Document) -> TileSchedule:
    assert document.tiles is not None
    return document.tiles


def test_the_work_of_all_levels_is_that_of_the_schedule(document: Document) -> None:
    levels = forward_levels(document.graph, schedule_of(document))
    assert sum(level.macs or 0 for tile in levels.values() for level in tile) == 24_336


def test_the_cells_of_all_tiles_divide_what_a_level_reads(document: Document) -> None:
    for levels in (forward_levels, backward_levels):
        tiles = levels(document.graph, schedule_of(document))
        for number, first in enumerate(next(iter(tiles.values()))):
            cells = [tile[number].reads[0].owned or Rect((), ()) for tile in tiles.values()]
            assert are_disjoint(cells)
            assert covers(cells, Rect.of_shape(first.reads[0].shape))


def test_a_halo_is_what_is_read_of_others(document: Document) -> None:
    corner = forward_levels(document.graph, schedule_of(document))[0, 0]
    first_conv = corner[-1]
    (read,) = first_conv.reads
    assert read.owned is not None
    assert (read.inside.shape, read.owned.shape) == ((11, 11), (4, 4))
    assert first_conv.halo_cells == 11 * 11 - 4 * 4


@pytest.mark.parametrize("grid", [(4,), (4, 0), ()])
def test_a_schedule_that_does_not_fit_its_graph_is_refused(document: Document, grid: tuple[int, ...]) -> None:
    with pytest.raises(InvalidGraph):
        forward_levels(document.graph, replace(schedule_of(document), grid=grid))


def test_a_tile_of_an_unknown_op_is_refused(document: Document) -> None:
    schedule = schedule_of(document)
    steps = tuple(replace(step, op="nobody") for step in schedule.forward[0, 0])
    with pytest.raises(InvalidGraph, match="nobody"):
        forward_levels(document.graph, replace(schedule, forward={(0, 0): steps}))
