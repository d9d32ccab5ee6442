"""The memory curve as a picture for a paper: bytes by kind, budget and baseline over the steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from stowplan.ir import Kind, Phase
from stowplan.report.page.subject import PageSubject
from stowplan.report.picture.png import png_of_drawing
from stowplan.report.picture.shapes import (
    Area,
    Drawing,
    Points,
    Polyline,
    Shape,
    Text,
    svg_of_drawing,
    width_of,
)
from stowplan.report.terminal import columns_of
from stowplan.units import format_bytes


def svg_of(subject: PageSubject) -> str:
    """The memory curve of a subject as SVG; its text stays text."""
    return svg_of_drawing(drawing_of(subject))


def png_of(subject: PageSubject) -> bytes:
    """The same picture in pixels, as many as print needs; takes a browser."""
    return png_of_drawing(drawing_of(subject))


_WIDTH, _HEIGHT = 720, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 14, 40, 40
_COLUMNS = 1200  # more cannot be told apart
_COLOURS = {
    Kind.PARAMETER: "#7d8a9c",
    Kind.BUFFER: "#aab3bf",
    Kind.INPUT: "#5aa9dd",
    Kind.ACTIVATION: "#2f6fb5",
    Kind.GRADIENT: "#e09a1a",
    Kind.MASK: "#1f9d7a",
    Kind.WORKSPACE: "#c873a4",
}
_PHASES = {
    Phase.FORWARD: "#2f6fb5",
    Phase.BACKWARD: "#b97a0c",
    Phase.UPDATE: "#1f9d7a",
    Phase.TRANSFER: "#7d8a9c",
    Phase.LAYOUT: "#8a5bbf",
}
_LINE, _GRID = "#333333", "#e0e0e0"
_DASH = (5.0, 3.0)
_BUDGET = "#c2185b"
_SOLID = {"offloaded": "#1f9d7a", "measured": "#111111"}
"""Colours of the curves that are not dashed, as the baseline's is."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve over the areas."""

    name: str
    values: Sequence[int]
    colour: str
    dash: tuple[float, ...] = ()


def drawing_of(subject: PageSubject) -> Drawing:
    """The picture of a subject, 720 by 340 points."""
    by_kind = {kind: _thinned(curve) for kind, curve in subject.timeline.bytes_by_kind().items()}
    lines = tuple(_lines(subject))
    allowed = subject.plan.allowed_bytes if subject.plan else None
    highest = int(subject.timeline.curve_bytes().max(initial=0))
    top = max(highest, allowed or 0, *(value for line in lines for value in line.values), 1) * 1.05
    shapes = (
        *_axes(top, len(subject.timeline.runs)),
        *_areas(by_kind, top),
        *_phases(subject),
        *(Polyline(_steps(line.values, top), line.colour, 1.2, line.dash) for line in lines if line.values),
        *_budget(allowed, top),
        *_legend(by_kind, lines),
    )
    return Drawing(f"{subject.name}: memory while each step runs", _WIDTH, _HEIGHT, shapes)


def _lines(subject: PageSubject) -> Iterator[Curve]:
    """The curves to compare with."""
    for name, curve in subject.curves_beside():
        yield Curve(name, _thinned(curve), _SOLID.get(name, _LINE), () if name in _SOLID else _DASH)


def _thinned(curve: NDArray[np.int64]) -> list[int]:
    """The highest value of each column, if there are more values than columns."""
    if len(curve) <= _COLUMNS:
        return [int(value) for value in curve]
    return [int(curve[shown.start : shown.stop].max()) for shown in columns_of(len(curve), _COLUMNS)]


def _y(size: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - size / top * (_HEIGHT - _TOP - _BOTTOM)


def _x(column: int, columns: int) -> float:
    return _LEFT + column / max(1, columns) * (_WIDTH - _LEFT - _RIGHT)


def _steps(values: Sequence[int], top: float) -> Points:
    """The points of a curve that holds each value for a whole column."""
    corners = ((column, value) for step, value in enumerate(values) for column in (step, step + 1))
    return tuple((_x(column, len(values)), _y(value, top)) for column, value in corners)


def _areas(by_kind: dict[Kind, list[int]], top: float) -> Iterator[Shape]:
    """The highest sum first, so that each kind is painted over those above it."""
    sums: list[tuple[Kind, list[int]]] = []
    below = [0] * len(next(iter(by_kind.values()), []))
    for kind, curve in by_kind.items():
        below = [low + value for low, value in zip(below, curve, strict=True)]
        sums.append((kind, below))
    ground = ((_x(1, 1), _y(0, top)), (_x(0, 1), _y(0, top)))
    for kind, total in reversed(sums):
        yield Area((*_steps(total, top), *ground), _COLOURS[kind])


def _phases(subject: PageSubject) -> Iterator[Shape]:
    """A band below the ground in the colours of the phases, and their names in the corner."""
    phase_of = {op.id: op.phase for op in subject.graph.ops}
    phases = [phase_of[run.op] for run in subject.timeline.runs]
    ground, x, begin = _HEIGHT - _BOTTOM, float(_LEFT), 0
    for phase, runs in groupby(phases):
        end = begin + len(list(runs))
        yield _block(_x(begin, len(phases)), _x(end, len(phases)), ground, ground + 4, _PHASES[phase])
        begin = end
    for phase in dict.fromkeys(phases):
        yield _block(x, x + 10, _HEIGHT - 16, _HEIGHT - 6, _PHASES[phase])
        yield Text(x + 14, _HEIGHT - 7, str(phase))
        x += 32 + width_of(phase)


def _block(left: float, right: float, top: float, bottom: float, colour: str) -> Area:
    return Area(((left, top), (right, top), (right, bottom), (left, bottom)), colour)


def _across(y: float) -> Points:
    return (_LEFT, y), (_WIDTH - _RIGHT, y)


def _budget(allowed: int | None, top: float) -> Iterator[Shape]:
    if allowed is not None:
        y = _y(allowed, top)
        yield Polyline(_across(y), _BUDGET, 1.5)
        yield Text(_LEFT + 4, y - 4, f"{format_bytes(allowed)} allowed", fill=_BUDGET)


def _axes(top: float, steps: int) -> Iterator[Shape]:
    between = max(1, 2 ** (int(top).bit_length() - 3))  # a power of two, for four to eight marks
    for size in range(0, int(top), between):
        y = _y(size, top)
        yield Polyline(_across(y), _GRID)
        yield Text(_LEFT - 6, y + 4, format_bytes(size).replace(".00", ""), "end")
    for share in range(5):
        step = steps * share // 4
        yield Text(_x(step, steps), _HEIGHT - _BOTTOM + 16, f"{step:,}", "end" if share == 4 else "middle")
    yield Text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, "step", "middle")


def _legend(by_kind: dict[Kind, list[int]], lines: Sequence[Curve]) -> Iterator[Shape]:
    x = float(_LEFT)
    for kind in by_kind:
        yield _block(x, x + 10, 12, 22, _COLOURS[kind])
        yield Text(x + 14, 21, str(kind))
        x += 32 + width_of(kind)
    for line in lines:
        yield Polyline(((x, 17), (x + 16, 17)), line.colour, 1.2, line.dash)
        yield Text(x + 20, 21, line.name)
        x += 38 + width_of(line.name)
