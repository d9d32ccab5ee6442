"""The rects written in a box. An element that OCR lost comes from another rect of the same box."""

from collections.abc import Iterable

from stowplan.errors import BadInput
from stowplan.formats.regiongraph.boxes import Box
from stowplan.formats.regiongraph.grammar import Sort
from stowplan.formats.regiongraph.numbers import is_part_of, listed, numbers_of, was_misread
from stowplan.formats.regiongraph.page import Field
from stowplan.formats.regiongraph.remarks import Remarks
from stowplan.formats.regiongraph.values import bounds_of
from stowplan.geometry import Point, Rect


def rects_of(box: Box, remarks: Remarks) -> dict[str, Rect | None]:
    """The box's rects by key; None where the box says None."""
    rects: dict[str, Rect | None] = {}
    broken = []
    for token in _written(box):
        bounds = bounds_of(token)
        if bounds and len(bounds[0]) != len(bounds[1]):
            broken.append((token, bounds[0], bounds[1]))
        else:
            rects[token.key] = Rect(*bounds) if bounds else None
            _remark_on(token, box, rects[token.key], remarks)
    whole = [rect for rect in rects.values() if rect is not None]
    return rects | {token.key: _mended(token, box, lo, hi, whole, remarks) for token, lo, hi in broken}


def _written(box: Box) -> Iterable[Field]:
    """The fields that hold rects. Every box has all of its fields but an update that is not on the page."""
    keys = [key for key in box.entry.fields if not key.endswith("dim")]
    missing = [key for key in keys if key not in box.fields]
    if box.entry.sort is Sort.UPDATE and not box.fields:
        return ()
    if missing:
        raise BadInput(f"{box.title} has no {missing[0]}", where=box.where)
    return (box.fields[key] for key in keys)


def _remark_on(token: Field, box: Box, rect: Rect | None, remarks: Remarks) -> None:
    for read in filter(was_misread, token.parts):
        became = listed(numbers_of(read))
        remarks.repaired(token.line, f"{token.key} of {box.title}", read, became)
    if rect is not None and rect.is_empty:
        remarks.odd(token.line, f"{token.key} of {box.title} is empty; kept")


def _mended(token: Field, box: Box, lo: Point, hi: Point, others: Iterable[Rect], remarks: Remarks) -> Rect:
    """The rect with its shorter list completed from another rect of the box."""
    what, why = f"{token.key} of {box.title}", "as in its other rect"
    for other in others:
        if len(lo) < len(hi) == other.ndim and is_part_of(lo, other.lo):
            remarks.repaired(token.line, what, token.parts[0], listed(other.lo), why)
            return Rect(other.lo, hi)
        if len(hi) < len(lo) == other.ndim and is_part_of(hi, other.hi):
            remarks.repaired(token.line, what, token.parts[1], listed(other.hi), why)
            return Rect(lo, other.hi)
    told = f"{what} has {len(lo)} low and {len(hi)} high bounds, and no other rect tells which is lost"
    raise BadInput(told, where=f"line {token.line}")
