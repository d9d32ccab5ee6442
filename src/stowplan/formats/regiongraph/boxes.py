"""The boxes of a page with their fields, rects and dims.

Boxes stand side by side, so one line holds fields of several boxes. Every kind of box has its fields in a
fixed order, at most one per line: a field belongs to the leftmost open box that still lacks it. Boxes with an
unreadable name, boxes that would skip a field, and boxes whose dims disagree come second.

An element that OCR lost from a rect comes from another rect of the box. Damaged dims become dims with the
same digits: the extent of the box's rects, or the dims of a related box (a gradient and its value, an op and
its result).
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from stowplan.errors import BadInput
from stowplan.formats.regiongraph.grammar import Entry, Sort
from stowplan.formats.regiongraph.names import Sighting
from stowplan.formats.regiongraph.page import Field, Remarks, Token, Words, bounds_of
from stowplan.formats.regiongraph.spelling import (
    LARGEST,
    digits_of,
    is_part_of,
    listed,
    numbers_of,
    only_split,
    run_together,
    was_misread,
)
from stowplan.geometry import Point, Rect
from stowplan.ir import Shape

_SIDE_BY_SIDE = 16  # more boxes than any row of a drawing holds open at once


@dataclass(slots=True, eq=False)
class Box:
    """A name with the fields found for it so far."""

    sighting: Sighting
    fields: dict[str, Field] = field(default_factory=dict)
    waiting: tuple[str, ...] = ()

    @staticmethod
    def of(sighting: Sighting) -> "Box":
        return Box(sighting, waiting=sighting.entry.fields)

    @property
    def entry(self) -> Entry:
        return self.sighting.entry

    @property
    def name(self) -> str:
        """Its name in the grammar."""
        return self.entry.name

    @property
    def title(self) -> str:
        """Its name as the page spells it."""
        return self.sighting.id

    @property
    def where(self) -> str:
        return f"line {self.sighting.line}"

    def take(self, token: Field) -> None:
        """Accept a field; those before it in the box can no longer come."""
        self.fields[token.key] = token
        self.waiting = self.waiting[self.waiting.index(token.key) + 1 :]


def boxes_on(page: Iterable[Token], sightings: Iterable[Sighting]) -> dict[str, Box]:
    """Every sighting as a box with its fields, by its name in the grammar."""
    boxes = {sighting.entry.name: Box.of(sighting) for sighting in sightings}
    starting = defaultdict(list)
    for box in sorted(boxes.values(), key=lambda box: box.sighting.at):
        starting[box.sighting.at[0]].append(box)
    line, run = 0, -1
    waiting: deque[Box] = deque(maxlen=_SIDE_BY_SIDE)
    served: list[Box] = []
    for token in page:
        if token.line != line:
            line, served = token.line, []
        if isinstance(token, Words):
            run += 1
            waiting.extend(box for box in starting[run] if box.waiting)
        elif isinstance(token, Field):
            _serve(token, waiting, served)
    return boxes


def _serve(token: Field, waiting: deque[Box], served: list[Box]) -> None:
    box = _owner(token, [box for box in waiting if token.key in box.waiting and box not in served])
    if box is not None:
        box.take(token)
        served.append(box)
        if not box.waiting:
            waiting.remove(box)


def _owner(token: Field, candidates: Sequence[Box]) -> Box | None:
    if candidates:
        return min(candidates, key=lambda box: _misfit(token, box))
    if any(digits_of(part) for part in token.parts) or not token.parts:
        raise BadInput(f"{token.key} belongs to no box on the page", where=f"line {token.line}")
    return None


def _misfit(token: Field, box: Box) -> tuple[bool, int, bool]:
    return not box.sighting.is_readable, box.waiting.index(token.key), _disagrees(token, box)


def _disagrees(token: Field, box: Box) -> bool:
    dim = box.fields.get("dim") or box.fields.get("result_dim")
    return dim is not None and digits_of(token.parts[-1] if token.parts else "") != digits_of(dim.parts[0])


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
    message = f"{what} has {len(lo)} low and {len(hi)} high bounds, and no other rect shows which is lost"
    raise BadInput(message, where=f"line {token.line}")


Rects: TypeAlias = Mapping[str, Rect | None]
_EXTENTS = ("read_rect", "write_rect", "dist_result")  # the rects that lie in what the dims describe


@dataclass(frozen=True, slots=True)
class Clue:
    """What a box says of its dims: the list as read, empty if lost, and the least that hold its rects."""

    name: str
    title: str
    key: str
    line: int
    read: str
    numbers: Shape
    extent: Shape | None

    @staticmethod
    def of(box: Box, rects: Rects) -> "Clue":
        key = box.entry.fields[0]
        token = box.fields.get(key)
        extent = _extent(box, rects)
        line, read = (box.sighting.line, "") if token is None else (token.line, token.parts[0])
        return Clue(box.name, box.title, key, line, read, numbers_of(read), extent)

    @property
    def is_whole(self) -> bool:
        """Whether there are as many sizes as the box's rects have dims; too large ones are several in one."""
        if not self.numbers or max(self.numbers) > LARGEST:
            return False
        return self.extent is None or len(self.extent) == len(self.numbers)


Proposal: TypeAlias = tuple[Shape, str]  # dims, and why they may be the right ones


def dims_of(boxes: Mapping[str, Box], rects: Mapping[str, Rects], remarks: Remarks) -> dict[str, Shape]:
    """The dims of every box that has them, by its name in the grammar."""
    clues = [Clue.of(box, rects[box.name]) for box in boxes.values() if box.fields and box.entry.gives_dims]
    dims = {clue.name: clue.numbers for clue in clues if clue.is_whole}
    for clue in clues:
        if clue.is_whole and was_misread(clue.read):
            _remark(clue, clue.numbers, "", remarks)
    _restore([clue for clue in clues if not clue.is_whole], dims, _kin_of(boxes), remarks)
    for clue in clues:
        _check(clue, dims[clue.name], remarks)
    return dims


def _extent(box: Box, rects: Rects) -> Shape | None:
    ends = [rect.hi for key in _EXTENTS if (rect := rects.get(key)) is not None]
    if len({len(end) for end in ends}) > 1:
        raise BadInput(f"the rects of {box.title} differ in their number of dims", where=box.where)
    return tuple(max(0, *sizes) for sizes in zip(*ends, strict=True)) if ends else None


def _kin_of(boxes: Mapping[str, Box]) -> dict[str, list[str]]:
    """For each box, the boxes about the same thing: their dims are mostly equal."""
    kin: dict[str, list[str]] = defaultdict(list)
    for name, box in boxes.items():
        for other in (box.entry.stem, box.entry.near):
            if other in boxes:
                kin[name].append(other)
                kin[other].append(name)
    return kin


def _restore(
    damaged: Sequence[Clue], dims: dict[str, Shape], kin: Mapping[str, Sequence[str]], remarks: Remarks
) -> None:
    """Settle the damaged dims, the surest way first; twice, because one settled may settle its kin."""
    for way in (_same_digits, _same_digits, _only_cut, _like_its_kin):
        for clue in damaged:
            if clue.name not in dims:
                known = [(dims[name], f"like {name}") for name in kin.get(clue.name, ()) if name in dims]
                proposal = way(clue, known)
                if proposal is not None:
                    dims[clue.name], why = proposal
                    _remark(clue, dims[clue.name], why, remarks)


def _same_digits(clue: Clue, known: Sequence[Proposal]) -> Proposal | None:
    proposals = [*known] if clue.extent is None else [(clue.extent, "as its rects have it"), *known]
    digits = digits_of(clue.read)
    return next((proposal for proposal in proposals if run_together(proposal[0]) == digits), None)


def _only_cut(clue: Clue, _: Sequence[Proposal]) -> Proposal | None:
    cut = None if clue.extent is None else only_split(digits_of(clue.read), clue.extent)
    return None if cut is None else (cut, "the only way to cut its digits")


def _like_its_kin(clue: Clue, known: Sequence[Proposal]) -> Proposal:
    """The last resort: dims of its kin that hold its rects, or just the extent of its rects."""
    if clue.extent is None:
        raise BadInput(f"{clue.key} of {clue.title} is unreadable: {clue.read!r}", where=f"line {clue.line}")
    fallback = (clue.extent, "as its rects have it")
    return next((proposal for proposal in known if _holds(proposal[0], clue.extent)), fallback)


def _holds(dims: Shape, extent: Shape) -> bool:
    return len(dims) == len(extent) and all(map(int.__ge__, dims, extent))


def _remark(clue: Clue, became: Shape, why: str, remarks: Remarks) -> None:
    remarks.repaired(clue.line, f"{clue.key} of {clue.title}", clue.read, listed(became), why)


def _check(clue: Clue, dims: Shape, remarks: Remarks) -> None:
    if any(size < 0 for size in dims):
        raise BadInput(f"{clue.key} of {clue.title} is negative: {listed(dims)}", where=f"line {clue.line}")
    if clue.extent is not None and not _holds(dims, clue.extent):
        beside = f"beside a rect up to [{listed(clue.extent)}]; kept"
        remarks.odd(clue.line, f"{clue.key} of {clue.title} is [{listed(dims)}] {beside}")
