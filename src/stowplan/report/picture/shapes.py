"""Shapes: the few things that a picture is made of, in points, y downwards; SVG and PNG spell only these."""

from dataclasses import dataclass
from typing import TypeAlias

Points: TypeAlias = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Area:
    """A filled polygon."""

    points: Points
    fill: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points; `dash` is how long it is drawn and left out in turn, nothing for a solid one."""

    points: Points
    stroke: str
    width: float = 1.0
    dash: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """Words on a baseline that begins, has its middle or ends at (x, y): `anchor` start, middle or end.

    A white rim keeps them readable over lines.
    """

    x: float
    y: float
    words: str
    anchor: str = "start"
    fill: str = "#333333"


Shape: TypeAlias = Area | Line | Text

SIZE = 11  # of all text


@dataclass(frozen=True, slots=True)
class Drawing:
    """Shapes, each over those before it, on a white sheet."""

    title: str
    width: int
    height: int
    shapes: tuple[Shape, ...]
