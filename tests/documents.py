"""Documents for many tests: a hypothesis strategy of whole ones, with every facet a file can carry."""

from typing import TypeVar

from hypothesis import strategies as st

from graphs import legal_graphs, texts
from stowplan.formats.stow.records import MOST_SECONDS
from stowplan.geometry import Rect
from stowplan.ir import (
    Allocation,
    Document,
    Interval,
    Note,
    NoteKind,
    Profile,
    Regions,
    TensorRegion,
    TileSchedule,
    TileStep,
)

_points = st.tuples(st.integers(-9, 9), st.integers(-9, 9))
_rects = st.builds(Rect, _points, _points)
_seconds = st.floats(-MOST_SECONDS, MOST_SECONDS)
_intervals = st.builds(Interval, _seconds, _seconds, _seconds)
_places = st.tuples(st.integers(0, 2**63), st.integers(0, 2**40))
_regions = st.builds(TensorRegion, st.none() | _rects, st.none() | _rects)
_steps = st.lists(st.builds(TileStep, texts, _rects, _rects, _rects), max_size=2).map(tuple)
_tiles = st.dictionaries(_points, _steps, max_size=2)
_notes = st.lists(st.builds(Note, st.sampled_from(NoteKind), texts, texts), max_size=2).map(tuple)

_Value = TypeVar("_Value")


def _by_name(values: st.SearchStrategy[_Value]) -> st.SearchStrategy[dict[str, _Value]]:
    return st.dictionaries(texts, values, max_size=2)


def documents(*, sized: bool = False) -> st.SearchStrategy[Document]:
    """Documents of any content; with `sized`, of a content that can be analysed."""
    return st.builds(
        Document,
        format=st.just("stow"),
        graph=legal_graphs(sized=sized),
        profile=st.none() | st.builds(Profile, _by_name(_by_name(_intervals)), st.booleans()),
        allocation=st.none() | st.builds(Allocation, _by_name(_places)),
        regions=st.none() | st.builds(Regions, _by_name(_regions), _by_name(_by_name(_rects))),
        tiles=st.none() if sized else st.none() | st.builds(TileSchedule, _points, _tiles, _tiles),
        notes=_notes,
        counts=_by_name(st.integers(0, 2**40)),
    )
