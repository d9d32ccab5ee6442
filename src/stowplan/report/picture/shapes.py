"""The shapes of a picture, in points with y downwards, and the drawing as SVG."""

from dataclasses import dataclass
from typing import TypeAlias, assert_never
from xml.sax.saxutils import escape

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


def svg_of_drawing(drawing: Drawing) -> str:
    """The drawing with its shapes one to a line."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {drawing.width} {drawing.height}" '
        f'width="{drawing.width}" height="{drawing.height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="{SIZE}">\n'
        f"<title>{escape(_legal(drawing.title))}</title>\n"
        + "\n".join(map(_spelled, drawing.shapes))
        + "\n</svg>\n"
    )


def _spelled(shape: Shape) -> str:
    match shape:
        case Area(points, fill):
            return f'<polygon fill="{fill}" points="{_pairs(points)}"/>'
        case Line(points, stroke, width, dash):
            dashes = f' stroke-dasharray="{" ".join(map(str, dash))}"' if dash else ""
            how = f'fill="none" stroke="{stroke}" stroke-width="{width}"{dashes}'
            return f'<polyline {how} points="{_pairs(points)}"/>'
        case Text(x, y, words, anchor, fill):
            rim = 'paint-order="stroke" stroke="#ffffff" stroke-width="3"'
            place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
            return f'<text {place} fill="{fill}" {rim}>{escape(_legal(words))}</text>'
        case _:
            assert_never(shape)


def _pairs(points: Points) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _legal(text: str) -> str:
    """XML has no place for control characters, whatever their spelling."""
    return "".join(char if char.isprintable() else "." for char in text)
