"""Cells: dims of a tensor as products of what was merged into them, so that shards stay rects.

A part of the batch and of the sequence is a rect of [batch, sequence, features], and none of the
[batch * sequence, features] that a linear layer is given. Seen as the cells ((batch, sequence), (features,))
it is one again. Rects of shards are over cells.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from stowplan.geometry import Rect
from stowplan.ir import Shape
from stowplan.ops.windows import Span


@dataclass(frozen=True, slots=True)
class Cells:
    """By dim, the sizes of its cells, outermost first; most dims have one."""

    groups: tuple[tuple[int, ...], ...]

    @staticmethod
    def of_shape(shape: Shape) -> "Cells":
        """One cell per dim."""
        return Cells(tuple((size,) for size in shape))

    @property
    def sizes(self) -> Shape:
        """The tensor's shape in cells."""
        return tuple(size for group in self.groups for size in group)

    @property
    def is_plain(self) -> bool:
        return all(len(group) == 1 for group in self.groups)

    def first(self, dim: int) -> int:
        """The number of a dim's first cell."""
        return sum(len(group) for group in self.groups[:dim])

    def dim_of(self, cell: int) -> int:
        """The dim that a cell belongs to."""
        return next(dim for dim in range(len(self.groups)) if cell < self.first(dim + 1))

    def spans(self, rect: Rect, dim: int) -> tuple[Span, ...]:
        """The extent of a rect over the cells of one dim."""
        start = self.first(dim)
        stop = start + len(self.groups[dim])
        return tuple(zip(rect.lo[start:stop], rect.hi[start:stop], strict=True))

    def flat(self, rect: Rect) -> Rect:
        """The smallest rect of the tensor itself that holds a rect of cells."""
        if self.is_plain:
            return rect
        pairs = [_flat_span(group, self.spans(rect, dim)) for dim, group in enumerate(self.groups)]
        return Rect(tuple(low for low, _ in pairs), tuple(high for _, high in pairs))

    def local(self, rect: Rect) -> Rect:
        """A rect as an op sees its part: where a dim has several cells, its place in it does not matter."""
        if self.is_plain:
            return rect
        pairs: list[Span] = []
        for dim in range(len(self.groups)):
            spans = self.spans(rect, dim)
            pairs.append(spans[0] if len(spans) == 1 else (0, prod(max(0, b - a) for a, b in spans)))
        return Rect(tuple(low for low, _ in pairs), tuple(high for _, high in pairs))

    def box(self, dim: int, span: Span) -> tuple[Span, ...]:
        """The smallest extent over the cells of a dim that holds the indices `span`."""
        group = self.groups[dim]
        if len(group) == 1:
            return (span,)
        found: list[Span] = []
        low, last = max(0, span[0]), min(prod(group), span[1]) - 1
        together = True
        for position, size in enumerate(group):
            below = prod(group[position + 1 :])
            a, b = low // below % size, last // below % size
            found.append((a, b + 1) if together else (0, size))
            together = together and a == b
        return tuple(found)


def _flat_span(group: tuple[int, ...], spans: tuple[Span, ...]) -> Span:
    if len(group) == 1:
        return spans[0]
    low = last = 0
    for size, (a, b) in zip(group, spans, strict=True):
        low, last = low * size + a, last * size + b - 1
    return low, max(low, last + 1)


def regrouped(cells: Cells, shape: Shape, cut: Sequence[int]) -> Cells:
    """The cells of a tensor reshaped to `shape`: a dim made of several keeps them if one of them is cut."""
    left = [(size, number in cut) for number, size in enumerate(cells.sizes) if size != 1]
    groups: list[tuple[int, ...]] = []
    for size in shape:
        group, is_cut = _taken(left, size)
        groups.append(group if is_cut and len(group) > 1 else (size,))
    return Cells(tuple(groups))


def _taken(left: list[tuple[int, bool]], size: int) -> tuple[tuple[int, ...], bool]:
    """The next cells, as many as make up `size`; a cell that is larger is split."""
    group: list[int] = []
    is_cut, have = False, 1
    while have < size and left and size % (have * left[0][0]) == 0:
        cell, was_cut = left.pop(0)
        group.append(cell)
        is_cut, have = is_cut or was_cut, have * cell
    if have < size:
        if not group and left and left[0][0] % size == 0:
            left[0] = (left[0][0] // size, left[0][1])
        else:
            left.clear()
        return (size,), False
    return tuple(group), is_cut
