"""The memory curve as an SVG for a paper: bytes by kind over the steps, the budget, plain beside planned."""

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from stowplan.analyse.alignment import curve_onto
from stowplan.ir import Kind
from stowplan.plan.timeline import plain_timeline_of
from stowplan.report.page.subject import Subject
from stowplan.report.terminal import columns_of
from stowplan.units import format_bytes

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
_LINE = "#333333"
_BUDGET = "#c2185b"


def picture_of(subject: Subject) -> str:
    """An SVG of 720 by 340 points; its text stays text."""
    by_kind = {kind: _thinned(curve) for kind, curve in subject.timeline.bytes_by_kind().items()}
    plan = subject.plan
    plain = _thinned(curve_onto(subject.timeline, plain_timeline_of(plan))) if plan else None
    allowed = plan.allowed_bytes if plan else None
    top = max(int(subject.timeline.curve_bytes().max(initial=0)), allowed or 0, *(plain or [0]), 1) * 1.05
    parts = [
        *_axes(top, len(subject.timeline.runs)),
        *_areas(by_kind, top),
        *_outline(plain, top),
        *_budget(allowed, top),
        *_legend(by_kind, plain is not None),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" font-family="Helvetica, Arial, sans-serif" font-size="11">\n'
        f"<title>{escape(_legal(subject.name))}: memory while each step runs</title>\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _thinned(curve: NDArray[np.int64]) -> list[int]:
    """The highest value of each column, if there are more values than columns."""
    if len(curve) <= _COLUMNS:
        return [int(value) for value in curve]
    return [int(curve[shown.start : shown.stop].max()) for shown in columns_of(len(curve), _COLUMNS)]


def _legal(text: str) -> str:
    """XML has no place for control characters, whatever their spelling."""
    return "".join(char if char.isprintable() else "." for char in text)


def _y(size: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - size / top * (_HEIGHT - _TOP - _BOTTOM)


def _x(column: int, columns: int) -> float:
    return _LEFT + column / max(1, columns) * (_WIDTH - _LEFT - _RIGHT)


def _steps(values: Sequence[int], top: float) -> str:
    """The points of a curve that holds each value for a whole column."""
    corners = [(column, value) for step, value in enumerate(values) for column in (step, step + 1)]
    return " ".join(f"{_x(column, len(values)):.1f},{_y(value, top):.1f}" for column, value in corners)


def _areas(by_kind: dict[Kind, list[int]], top: float) -> Iterator[str]:
    """The highest sum first, so that each kind is painted over those above it."""
    sums: list[tuple[Kind, list[int]]] = []
    below = [0] * len(next(iter(by_kind.values()), []))
    for kind, curve in by_kind.items():
        below = [low + value for low, value in zip(below, curve, strict=True)]
        sums.append((kind, below))
    for kind, total in reversed(sums):
        corners = f"{_x(1, 1):.1f},{_y(0, top):.1f} {_LEFT},{_y(0, top):.1f}"
        yield f'<polygon fill="{_COLOURS[kind]}" points="{_steps(total, top)} {corners}"/>'


def _outline(plain: list[int] | None, top: float) -> Iterator[str]:
    if plain:
        yield (
            f'<polyline fill="none" stroke="{_LINE}" stroke-width="1.2" stroke-dasharray="5 3" '
            f'points="{_steps(plain, top)}"/>'
        )


def _budget(allowed: int | None, top: float) -> Iterator[str]:
    if allowed is not None:
        y = _y(allowed, top)
        yield f'<path stroke="{_BUDGET}" stroke-width="1.5" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
        yield _text(_LEFT + 4, y - 4, f"{format_bytes(allowed)} allowed", fill=_BUDGET)


def _axes(top: float, steps: int) -> Iterator[str]:
    between = max(1, 2 ** (int(top).bit_length() - 3))  # a power of two, for four to eight marks
    for size in range(0, int(top), between):
        y = _y(size, top)
        yield f'<path stroke="#e0e0e0" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
        yield _text(_LEFT - 6, y + 4, format_bytes(size), anchor="end")
    for share in range(5):
        step = steps * share // 4
        yield _text(_x(step, steps), _HEIGHT - _BOTTOM + 16, f"{step:,}", anchor="middle")
    yield _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, "step", anchor="middle")


def _legend(by_kind: dict[Kind, list[int]], with_plain: bool) -> Iterator[str]:
    x = float(_LEFT)
    for kind in by_kind:
        yield f'<rect x="{x:.0f}" y="12" width="10" height="10" fill="{_COLOURS[kind]}"/>'
        yield _text(x + 14, 21, str(kind))
        x += 30 + 6.2 * len(kind)
    if with_plain:
        yield f'<path stroke="{_LINE}" stroke-dasharray="5 3" d="M{x:.0f} 17h16"/>'
        yield _text(x + 20, 21, "plain")


def _text(x: float, y: float, text: str, *, anchor: str = "start", fill: str = _LINE) -> str:
    """Text on a white rim, which keeps it readable over lines."""
    rim = 'paint-order="stroke" stroke="#ffffff" stroke-width="3"'
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" {rim}>{escape(text)}</text>'
