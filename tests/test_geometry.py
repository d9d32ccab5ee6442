"""Rect against the sets of points it stands for."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stowplan.geometry import Point, Rect, are_disjoint, covers

_COORDINATE = st.integers(-4, 5)


def rects_of(ndim: int) -> st.SearchStrategy[Rect]:
    """Small rects, a good part of them empty, some with lo > hi."""
    corner = st.tuples(*[_COORDINATE] * ndim)
    return st.builds(Rect, corner, corner)


def families(count: int) -> st.SearchStrategy[list[Rect]]:
    """Rects that share their number of dims, zero included."""
    return st.integers(0, 3).flatmap(lambda n: st.lists(rects_of(n), min_size=count, max_size=count))


@st.composite
def rects_with_shapes(draw: st.DrawFn) -> tuple[Rect, Point]:
    ndim = draw(st.integers(0, 3))
    return draw(rects_of(ndim)), draw(st.tuples(*[st.integers(0, 4)] * ndim))


@st.composite
def rects_with_parts(draw: st.DrawFn) -> tuple[Rect, Point]:
    ndim = draw(st.integers(0, 3))
    return draw(rects_of(ndim)), draw(st.tuples(*[st.integers(1, 4)] * ndim))


def points_of(*rects: Rect) -> set[Point]:
    return {point for rect in rects for point in rect.points()}


@given(families(1))
def test_volume_and_emptiness_count_the_points(family: list[Rect]) -> None:
    (rect,) = family
    assert rect.volume == len(points_of(rect))
    assert rect.is_empty == (not points_of(rect))


@given(families(2))
def test_intersect_holds_the_common_points(pair: list[Rect]) -> None:
    a, b = pair
    assert points_of(a.intersect(b)) == points_of(a) & points_of(b)


@given(families(2))
def test_hull_is_the_smallest_rect_around_both(pair: list[Rect]) -> None:
    a, b = pair
    hull, points = a.hull(b), points_of(a, b)
    assert points <= points_of(hull)
    for dim, (low, high) in enumerate(zip(hull.lo, hull.hi, strict=True)):
        along = {point[dim] for point in points}
        assert not along or (min(along), max(along) + 1) == (low, high)


@given(families(2))
def test_contains_is_the_subset_relation(pair: list[Rect]) -> None:
    a, b = pair
    assert a.contains(b) == (points_of(b) <= points_of(a))


@given(families(2))
def test_difference_is_exact_and_disjoint(pair: list[Rect]) -> None:
    a, b = pair
    pieces = a.difference(b)
    assert points_of(*pieces) == points_of(a) - points_of(b)
    assert sum(piece.volume for piece in pieces) == len(points_of(*pieces))
    assert not any(piece.is_empty for piece in pieces)
    assert len(pieces) <= max(1, 2 * a.ndim)


@given(families(1), st.data())
def test_shift_moves_every_point(family: list[Rect], data: st.DataObject) -> None:
    (rect,) = family
    offset = data.draw(st.tuples(*[_COORDINATE] * rect.ndim))
    moved = {tuple(p + o for p, o in zip(point, offset, strict=True)) for point in points_of(rect)}
    assert points_of(rect.shift(offset)) == moved


@given(rects_with_shapes())
def test_clip_keeps_what_lies_inside_the_tensor(case: tuple[Rect, Point]) -> None:
    rect, shape = case
    assert points_of(rect.clip(shape)) == points_of(rect) & points_of(Rect.of_shape(shape))


@given(rects_with_shapes())
def test_overhang_and_clip_make_up_the_whole_rect(case: tuple[Rect, Point]) -> None:
    rect, shape = case
    padding = rect.overhang(shape)
    for dim, (before, after) in enumerate(padding):
        along = range(rect.lo[dim], rect.hi[dim])
        assert before == sum(p < 0 for p in along)
        assert after == sum(p >= shape[dim] for p in along if p >= 0)
        assert before + rect.clip(shape).shape[dim] + after == len(along)


@given(rects_with_parts())
def test_split_is_a_partition_into_nearly_equal_parts(case: tuple[Rect, Point]) -> None:
    rect, parts = case
    pieces = rect.split(parts)
    assert len(pieces) == Rect.of_shape(parts).volume
    assert points_of(*pieces) == points_of(rect)
    assert sum(piece.volume for piece in pieces) == rect.volume
    for dim in range(rect.ndim):
        sizes = {piece.shape[dim] for piece in pieces}
        assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 3).flatmap(lambda n: st.lists(rects_of(n), max_size=5)))
def test_are_disjoint_compares_every_pair(rects: list[Rect]) -> None:
    pairs = combinations(rects, 2)
    assert are_disjoint(rects) == (not any(points_of(a) & points_of(b) for a, b in pairs))


@given(families(5))
def test_covers_is_union_of_points(rects: list[Rect]) -> None:
    whole, *cover = rects
    assert covers(cover, whole) == (points_of(whole) <= points_of(*cover))


@given(rects_with_parts())
def test_a_split_covers_and_is_disjoint_until_a_piece_is_lost(case: tuple[Rect, Point]) -> None:
    rect, parts = case
    pieces = rect.split(parts)
    assert covers(pieces, rect)
    assert are_disjoint(pieces)
    if not rect.is_empty:
        largest = max(pieces, key=lambda piece: piece.volume)
        assert not covers([piece for piece in pieces if piece != largest], rect)
        assert not are_disjoint([*pieces, largest])


def test_a_rect_without_dims_is_one_point() -> None:
    scalar = Rect.of_shape(())
    assert (scalar.volume, scalar.is_empty, list(scalar.points())) == (1, False, [()])
    assert scalar.split(()) == (scalar,)
    assert str(scalar) == "[]"


def test_rects_of_different_dims_do_not_mix() -> None:
    with pytest.raises(ValueError, match="lo has 1 dims, hi has 2"):
        Rect((0,), (1, 1))
    with pytest.raises(ValueError, match="1 and 2 dims"):
        Rect.of_shape((1,)).intersect(Rect.of_shape((1, 1)))
    with pytest.raises(ValueError, match="into 0 parts"):
        Rect.of_shape((4,)).split((0,))


def test_a_rect_prints_as_half_open_intervals() -> None:
    assert str(Rect((-1, 0), (3, 4))) == "[-1,3)x[0,4)"
