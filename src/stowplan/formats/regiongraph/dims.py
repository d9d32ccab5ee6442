"""The dims written in boxes. Digits that ran together, and dims that are lost, are restored from the page.

Whole dims are taken as they stand. Damaged ones become what has the same digits: the extent of the box's own
rects, or the dims of a box about the same thing (a gradient and its value, an op and its result).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stowplan.errors import BadInput
from stowplan.formats.regiongraph.boxes import Box
from stowplan.formats.regiongraph.numbers import (
    LARGEST,
    digits_of,
    listed,
    numbers_of,
    only_split,
    run_together,
    was_misread,
)
from stowplan.formats.regiongraph.remarks import Remarks
from stowplan.geometry import Rect
from stowplan.ir import Shape

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
