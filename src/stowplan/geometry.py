"""Rect: a half-open box of integers `[lo, hi)` in any number of dims.

Tiles, shards, halos and slices are all rectangles; this is the only place that does arithmetic on them.
A rect may reach below 0 or past a tensor's border: what lies outside the tensor is padding.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from operator import le
from typing import TypeAlias

Point: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rect:
    """The points p with lo[i] <= p[i] < hi[i] for every dim i. Empty as soon as one dim is."""

    lo: Point
    hi: Point

    def __post_init__(self) -> None:
        if len(self.lo) != len(self.hi):
            raise ValueError(f"lo has {len(self.lo)} dims, hi has {len(self.hi)}")

    @staticmethod
    def of_shape(shape: Sequence[int]) -> "Rect":
        """The rect of a whole tensor."""
        return Rect((0,) * len(shape), tuple(shape))

    @property
    def ndim(self) -> int:
        return len(self.lo)

    @property
    def shape(self) -> Point:
        return tuple([high - low if high > low else 0 for low, high in zip(self.lo, self.hi, strict=True)])

    @property
    def volume(self) -> int:
        """How many points it holds."""
        points = 1
        for low, high in zip(self.lo, self.hi, strict=True):
            points *= high - low if high > low else 0
        return points

    @property
    def is_empty(self) -> bool:
        return any(map(le, self.hi, self.lo))

    def intersect(self, other: "Rect") -> "Rect":
        """The points in both."""
        self._same_ndim(other)
        return Rect(tuple(map(max, self.lo, other.lo)), tuple(map(min, self.hi, other.hi)))

    def hull(self, other: "Rect") -> "Rect":
        """The smallest rect holding both; an empty rect adds nothing."""
        self._same_ndim(other)
        if self.is_empty:
            return other
        if other.is_empty:
            return self
        return Rect(tuple(map(min, self.lo, other.lo)), tuple(map(max, self.hi, other.hi)))

    def shift(self, offset: Sequence[int]) -> "Rect":
        """The rect moved by `offset`."""
        return Rect(
            tuple(low + o for low, o in zip(self.lo, offset, strict=True)),
            tuple(high + o for high, o in zip(self.hi, offset, strict=True)),
        )

    def clip(self, shape: Sequence[int]) -> "Rect":
        """The part inside a tensor of this shape."""
        if len(shape) != self.ndim:
            raise ValueError(f"a rect of {self.ndim} dims is not part of a tensor of {len(shape)}")
        if min(self.lo, default=0) >= 0 and all(map(le, self.hi, shape)):
            return self
        return Rect(tuple([max(0, low) for low in self.lo]), tuple(map(min, self.hi, shape)))

    def overhang(self, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """How many of its points lie before and after a tensor of this shape, per dim: its padding."""
        return tuple(
            (max(0, min(high, 0) - low), max(0, high - max(low, size)))
            for low, high, size in zip(self.lo, self.hi, shape, strict=True)
        )

    def contains(self, other: "Rect") -> bool:
        """Whether every point of `other` is in this rect; an empty rect is in every rect."""
        self._same_ndim(other)
        return other.is_empty or (
            all(a <= b for a, b in zip(self.lo, other.lo, strict=True))
            and all(a >= b for a, b in zip(self.hi, other.hi, strict=True))
        )

    def difference(self, other: "Rect") -> tuple["Rect", ...]:
        """The points not in `other`, as disjoint rects: at most two per dim."""
        common = self.intersect(other)
        if common.is_empty:
            return () if self.is_empty else (self,)
        pieces = []
        lo, hi = list(self.lo), list(self.hi)
        for dim in range(self.ndim):
            if lo[dim] < common.lo[dim]:
                pieces.append(Rect(tuple(lo), (*hi[:dim], common.lo[dim], *hi[dim + 1 :])))
            if common.hi[dim] < hi[dim]:
                pieces.append(Rect((*lo[:dim], common.hi[dim], *lo[dim + 1 :]), tuple(hi)))
            lo[dim], hi[dim] = common.lo[dim], common.hi[dim]
        return tuple(pieces)

    def split(self, parts: Sequence[int]) -> tuple["Rect", ...]:
        """A grid of `parts[i]` nearly equal pieces along dim i, in row-major order.

        Sizes differ by at most one; with more parts than points, some pieces are empty.
        """
        cuts = [_cuts(low, high, n) for low, high, n in zip(self.lo, self.hi, parts, strict=True)]
        return tuple(
            Rect(tuple(low for low, _ in cell), tuple(high for _, high in cell)) for cell in product(*cuts)
        )

    def points(self) -> Iterator[Point]:
        """Every point, row-major; for tests and small rects."""
        return product(*(range(low, high) for low, high in zip(self.lo, self.hi, strict=True)))

    def _same_ndim(self, other: "Rect") -> None:
        if self.ndim != other.ndim:
            raise ValueError(f"rects of {self.ndim} and {other.ndim} dims do not compare")

    def __str__(self) -> str:
        return "x".join(f"[{low},{high})" for low, high in zip(self.lo, self.hi, strict=True)) or "[]"


def _cuts(lo: int, hi: int, parts: int) -> list[tuple[int, int]]:
    if parts < 1:
        raise ValueError(f"cannot split into {parts} parts")
    size = max(0, hi - lo)
    edges = [lo + size * i // parts for i in range(parts + 1)]
    return list(pairwise(edges))


def are_disjoint(rects: Iterable[Rect]) -> bool:
    """Whether no point lies in two of the rects. Sweeps along dim 0."""
    active: list[Rect] = []
    for rect in sorted((r for r in rects if not r.is_empty), key=lambda r: r.lo):
        if rect.ndim:
            active = [a for a in active if a.hi[0] > rect.lo[0]]
        if any(not a.intersect(rect).is_empty for a in active):
            return False
        active.append(rect)
    return True


def covers(rects: Iterable[Rect], whole: Rect) -> bool:
    """Whether every point of `whole` lies in at least one of the rects."""
    left = [whole] if not whole.is_empty else []
    for rect in rects:
        left = [piece for part in left for piece in part.difference(rect)]
        if not left:
            return True
    return not left
