"""How dims and rects are spelt: written here, and read back from the lists of numbers of a field."""

from collections.abc import Iterable

from stowplan.errors import BadInput
from stowplan.formats.regiongraph.numbers import LARGEST, numbers_of
from stowplan.formats.regiongraph.page import Field
from stowplan.geometry import Point, Rect

_MOST_DIMS = 32  # of a numpy array


def dims_text(sizes: Iterable[object]) -> str:
    """`[1 64 32]`."""
    return f"[{' '.join(map(str, sizes))}]"


def rect_text(rect: Rect | None) -> str:
    """`Rect(array([lo..], dtype=int32), array([hi..], dtype=int32))`, or `None`."""
    if rect is None:
        return "None"
    lo, hi = (f"array([{', '.join(map(str, bounds))}], dtype=int32)" for bounds in (rect.lo, rect.hi))
    return f"Rect({lo}, {hi})"


def bounds_of(token: Field) -> tuple[Point, ...]:
    """The lists of a field, as far as they can be read: low and high bounds of a rect, none for None."""
    return tuple(_bounds(part, token.line) for part in token.parts)


def rect_of(token: Field) -> Rect | None:
    """The rect of a field that is whole."""
    bounds = bounds_of(token)
    if not bounds:
        return None
    lo, hi = bounds
    if len(lo) != len(hi):
        told = f"{token.key} has {len(lo)} low and {len(hi)} high bounds"
        raise BadInput(told, where=f"line {token.line}")
    return Rect(lo, hi)


def _bounds(text: str, line: int) -> Point:
    bounds = numbers_of(text)
    if len(bounds) > _MOST_DIMS:
        raise BadInput(f"{len(bounds)} dims, of at most {_MOST_DIMS}", where=f"line {line}")
    for bound in bounds:
        if abs(bound) > LARGEST:
            raise BadInput(f"{bound:.3g} does not fit int32", where=f"line {line}")
    return bounds
