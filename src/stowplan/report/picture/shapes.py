"""The shapes of a picture, in points with y downwards, and the drawing as SVG."""

from dataclasses import dataclass
from typing import TypeAlias, assert_never
from xml.sax.saxutils import escape

from stowplan.units import on_one_line

Points: TypeAlias = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Area:
    """A filled polygon."""

    points: Points
    fill: str


@dataclass(frozen=True, slots=True)
class Polyline:
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


Shape: TypeAlias = Area | Polyline | Text

SIZE = 11  # of all text
_LETTER = 0.52  # of the size: the width of a letter, in the mean over words in Helvetica


def width_of(words: str) -> float:
    """About how wide a text is. Who shows a picture has the font, and measures it."""
    return len(words) * _LETTER * SIZE


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
        f"<title>{escape(on_one_line(drawing.title))}</title>\n"
        + "\n".join(map(_spelled, drawing.shapes))
        + "\n</svg>\n"
    )


def _spelled(shape: Shape) -> str:
    match shape:
        case Area(points, fill):
            return f'<polygon fill="{fill}" points="{_pairs(points)}"/>'
        case Polyline(points, stroke, width, dash):
            dashes = f' stroke-dasharray="{" ".join(map(str, dash))}"' if dash else ""
            how = f'fill="none" stroke="{stroke}" stroke-width="{width}"{dashes}'
            return f'<polyline {how} points="{_pairs(points)}"/>'
        case Text(x, y, words, anchor, fill):
            rim = 'paint-order="stroke" stroke="#ffffff" stroke-width="3"'
            place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
            return f'<text {place} fill="{fill}" {rim}>{escape(on_one_line(words))}</text>'
        case _:
            assert_never(shape)


def _pairs(points: Points) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
