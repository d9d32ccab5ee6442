"""Plots of measured figures: points with their spread over two axes, and bars beside those of eager."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, cos, floor, log10, pi, sin

from stowplan.report.picture.shapes import Area, Drawing, Polyline, Shape, Text, width_of

WIDTH, HEIGHT = 720, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 18, 40, 44
_INK, _FAINT, _GRID = "#1c2430", "#5f6b7a", "#e3e7ec"
_ROW = 34
_BAR_LEFT, _BAR_RIGHT = 210, 215


@dataclass(frozen=True, slots=True)
class Point:
    """A place and, upwards and downwards, the quartiles of what was measured."""

    x: float
    y: float
    spread: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour; `joined` by a line where one leads to the next."""

    name: str
    colour: str
    points: tuple[Point, ...]
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """The title of an axis, the text of its values, and whether it begins at zero."""

    title: str
    told: Callable[[float], str]
    from_zero: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """A value, eager's value, and a note."""

    label: str
    value: float
    plain: float
    note: str
    colour: str


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values to places."""

    axis: Axis
    low: float
    high: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    def marks(self) -> list[float]:
        step = _round_step((self.high - self.low) / 5)
        first = ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, floor(self.high / step + 1e-9) + 1)]


def scatter(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> Drawing:
    """All series over two axes that just hold them."""
    points = [point for each in series for point in each.points]
    ends = [end for point in points for end in (point.y, *(point.spread or ()))]
    across = _scale(x, [point.x for point in points], _LEFT, WIDTH - _RIGHT)
    upwards = _scale(y, ends, HEIGHT - _BOTTOM, _TOP)
    shapes = (*_axes(across, upwards), *_drawn(series, across, upwards), *_legend(series))
    return Drawing(title, WIDTH, HEIGHT, shapes)


def bars(title: str, rows: Sequence[Bar], told: Callable[[float], str]) -> Drawing:
    """One row for each, in front of eager's bar."""
    most = max(bar.plain for bar in rows)
    room = WIDTH - _BAR_LEFT - _BAR_RIGHT
    shapes: list[Shape] = []
    for place, bar in enumerate(rows):
        y = 8 + place * _ROW
        plain, value = (_BAR_LEFT + room * size / most for size in (bar.plain, bar.value))
        shapes.append(Text(_BAR_LEFT - 8, y + 15, bar.label, "end", _INK))
        shapes.append(_box(_BAR_LEFT, y, plain, y + 22, _GRID))
        shapes.append(_box(_BAR_LEFT, y + 4, value, y + 18, bar.colour))
        words = f"{told(bar.value)} of {told(bar.plain)}{bar.note}"
        shapes.append(Text(min(plain, WIDTH - _BAR_RIGHT) + 6, y + 15, words, "start", _FAINT))
    return Drawing(title, WIDTH, 14 + _ROW * len(rows), tuple(shapes))


def _scale(axis: Axis, values: Sequence[float], start: float, stop: float) -> _Scale:
    low, high = 0.0 if axis.from_zero else min(values), max(values)
    margin = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    return _Scale(axis, low if axis.from_zero else low - margin, high + margin, start, stop)


def _round_step(step: float) -> float:
    tens = 10.0 ** floor(log10(step))
    return next(factor * tens for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * tens >= step)


def _axes(across: _Scale, upwards: _Scale) -> Iterator[Shape]:
    for mark in upwards.marks():
        y = upwards.at(mark)
        yield Polyline(((_LEFT, y), (WIDTH - _RIGHT, y)), _GRID)
        yield Text(_LEFT - 6, y + 4, upwards.axis.told(mark), "end", _FAINT)
    for mark in across.marks():
        x = across.at(mark)
        yield Polyline(((x, _TOP), (x, HEIGHT - _BOTTOM)), _GRID)
        yield Text(x, HEIGHT - _BOTTOM + 16, across.axis.told(mark), "middle", _FAINT)
    yield Text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 8, across.axis.title, "middle", _FAINT)
    yield Text(8, _TOP - 8, upwards.axis.title, "start", _FAINT)


def _drawn(series: Sequence[Series], across: _Scale, upwards: _Scale) -> Iterator[Shape]:
    for each in series:
        places = [(across.at(point.x), upwards.at(point.y)) for point in each.points]
        if each.joined:
            yield Polyline(tuple(sorted(places)), each.colour, 1.2)
        for point, (x, y) in zip(each.points, places, strict=True):
            if point.spread:
                yield Polyline(tuple((x, upwards.at(end)) for end in point.spread), each.colour, 1.2)
            yield _dot(x, y, each.colour)


def _legend(series: Sequence[Series]) -> Iterator[Shape]:
    x = float(_LEFT)
    for each in series:
        yield _dot(x + 5, 14, each.colour)
        yield Text(x + 14, 18, each.name, "start", _INK)
        x += 34 + width_of(each.name)


def _dot(x: float, y: float, colour: str) -> Area:
    corners = (2 * pi * n / 16 for n in range(16))
    return Area(tuple((x + 4.5 * cos(turn), y + 4.5 * sin(turn)) for turn in corners), colour)


def _box(left: float, top: float, right: float, bottom: float, colour: str) -> Area:
    return Area(((left, top), (right, top), (right, bottom), (left, bottom)), colour)
