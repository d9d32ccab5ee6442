"""Grid: workers in places along named axes. An axis cuts a dim of a tensor into one span per place."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, product
from math import prod

from stowplan.errors import BadUse
from stowplan.ops.windows import Span

_MOST_WORKERS = 2**20


@dataclass(frozen=True, slots=True)
class Axis:
    """One direction of a mesh. `weights` are the shares of its places; without any, all are alike."""

    name: str
    size: int
    weights: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 1:
            raise BadUse(f"mesh axis {self.name!r} has {self.size} workers; it has at least 1")
        if (self.weights and len(self.weights) != self.size) or min(self.weights or [1]) < 1:
            raise BadUse(f"mesh axis {self.name!r} of {self.size} workers cannot have weights {self.weights}")

    def span(self, size: int, place: int) -> Span:
        """The indices of a dim of `size` that belong to `place`; empty where there are more places."""
        bounds = self.bounds(size)
        return bounds[place], bounds[place + 1]

    def bounds(self, size: int) -> tuple[int, ...]:
        """Where the spans of a dim of `size` begin, and its end."""
        return _bounds(self, size)

    def places_of(self, size: int, span: Span) -> range:
        """The places to which indices of a dim of `size` belong."""
        bounds = self.bounds(size)
        return range(max(0, bisect_right(bounds, span[0]) - 1), min(self.size, bisect_left(bounds, span[1])))


@cache
def _bounds(axis: Axis, size: int) -> tuple[int, ...]:
    shares = (0, *accumulate(axis.weights or (1,) * axis.size))
    return tuple(size * share // shares[-1] for share in shares)


@dataclass(frozen=True, slots=True)
class MeshAxes:
    """Workers numbered in row-major order of their places on the axes."""

    axes: tuple[Axis, ...]

    @property
    def size(self) -> int:
        """How many workers there are."""
        return prod(axis.size for axis in self.axes)

    def places(self) -> Iterator[tuple[int, ...]]:
        """The place of every worker."""
        return product(*(range(axis.size) for axis in self.axes))

    def place(self, worker: int) -> tuple[int, ...]:
        """A worker's position on each axis."""
        found = []
        for axis in reversed(self.axes):
            worker, position = divmod(worker, axis.size)
            found.append(position)
        return tuple(reversed(found))

    def worker(self, place: Sequence[int]) -> int:
        """The worker at a position."""
        number = 0
        for axis, position in zip(self.axes, place, strict=True):
            number = number * axis.size + position
        return number

    def on_axis(self, axis: int, place: int) -> int:
        """The worker at a position of one axis, and at the first of all others."""
        return self.worker([place if number == axis else 0 for number in range(len(self.axes))])

    @property
    def middle(self) -> int:
        """Who has neighbours on all sides, where anyone does."""
        return self.worker([axis.size // 2 for axis in self.axes])

    def along(self, worker: int, axes: Sequence[int]) -> tuple[int, ...]:
        """The workers that differ from `worker` at most in their places on these axes."""
        place = self.place(worker)
        free = (range(a.size) if n in axes else (place[n],) for n, a in enumerate(self.axes))
        return tuple(self.worker(p) for p in product(*free))

    def __str__(self) -> str:
        return ",".join(f"{axis.name}={_spelled(axis)}" for axis in self.axes)


def parse_mesh(text: str) -> MeshAxes:
    """`data=2,space=2x2`; a size `3:1:1` is an axis of three workers with these shares."""
    axes: list[Axis] = []
    for item in text.split(","):
        name, found, sizes = item.strip().partition("=")
        if not (found and name.isidentifier()):
            raise BadUse(f"{item!r} is no mesh axis; write NAME=SIZE, such as data=2 or space=2x2")
        axes += (_axis(name, size) for size in sizes.split("x"))
    refuse_too_many(prod(axis.size for axis in axes))
    return MeshAxes(tuple(axes))


def refuse_too_many(workers: int) -> None:
    """BadUse for more workers than a projection has room for."""
    if workers > _MOST_WORKERS:
        raise BadUse(
            f"{workers:,} workers are more than the {_MOST_WORKERS:,} that are projected; take fewer"
        )


def _axis(name: str, text: str) -> Axis:
    try:
        numbers = tuple(map(int, text.split(":")))
    except ValueError:
        raise BadUse(
            f"mesh axis {name!r} has size {text!r}; write a number of workers, as in {name}=2"
        ) from None
    return Axis(name, len(numbers), numbers) if len(numbers) > 1 else Axis(name, numbers[0])


def _spelled(axis: Axis) -> str:
    return ":".join(map(str, axis.weights)) or str(axis.size)
