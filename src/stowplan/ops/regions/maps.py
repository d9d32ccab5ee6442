"""The maps of one input dim onto an output rect: windows, blocks, borders, resizing, flat indices."""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from math import floor, prod

from stowplan.errors import MissingRule
from stowplan.geometry import Rect
from stowplan.ops.regions.relation import DimKind, emptied, with_span
from stowplan.ops.windows import Span, Window

_POINT = Window()


@dataclass(frozen=True, slots=True)
class Along(ABC):
    """A map of an input dim of `size` that follows one output dim: later outputs need later inputs."""

    dim: int
    size: int

    @abstractmethod
    def needs(self, outputs: Span) -> Span:
        """The indices that a span of outputs, not empty, needs."""

    @property
    def overlaps(self) -> bool:
        """Whether neighbouring spans of outputs can need the same index."""
        return True

    def pull(self, outputs: Rect) -> Span:
        return self.needs((outputs.lo[self.dim], outputs.hi[self.dim]))

    def narrow(self, outputs: Rect, inputs: Span) -> Rect:
        """By bisection, because the first and last index needed grow with the output."""
        candidates = range(outputs.lo[self.dim], outputs.hi[self.dim])
        start = bisect_left(candidates, inputs[0], key=lambda i: max(0, self.needs((i, i + 1))[0]))
        stop = bisect_right(candidates, inputs[1], key=lambda i: min(self.size, self.needs((i, i + 1))[1]))
        return with_span(outputs, self.dim, (outputs.lo[self.dim] + start, outputs.lo[self.dim] + stop))

    def kind_of(self, dim: int) -> DimKind:
        if dim != self.dim:
            return DimKind.SHARED
        return DimKind.HALO if self.overlaps else DimKind.FREE


@dataclass(frozen=True, slots=True)
class Sliding(Along):
    """A window over the dim. The default is the identity; `before` shifts, `stride` takes every n-th."""

    window: Window = _POINT

    def needs(self, outputs: Span) -> Span:
        return self.window.pull(outputs)

    @property
    def overlaps(self) -> bool:
        return self.window.extent > (1 if self.window.transposed else self.window.stride)


@dataclass(frozen=True, slots=True)
class Grouped(Along):
    """Each block of `outputs` outputs needs its block of `inputs` inputs: channel groups, pixel shuffles."""

    outputs: int
    inputs: int

    def __post_init__(self) -> None:
        if self.outputs < 1:
            raise MissingRule(f"{self.size} inputs are in more groups than there are outputs")

    def needs(self, outputs: Span) -> Span:
        low, high = outputs
        return low // self.outputs * self.inputs, ((high - 1) // self.outputs + 1) * self.inputs

    @property
    def overlaps(self) -> bool:
        return self.outputs > 1


@dataclass(frozen=True, slots=True)
class Prefix(Along):
    """Output i needs inputs 0 .. i: a causal mask, a running sum."""

    def needs(self, outputs: Span) -> Span:
        return 0, min(self.size, outputs[1])


@dataclass(frozen=True, slots=True)
class Adaptive(Along):
    """`outputs` windows of nearly equal size that cover the input: adaptive pooling."""

    outputs: int

    def needs(self, outputs: Span) -> Span:
        low, high = outputs
        return low * self.size // self.outputs, -(-high * self.size // self.outputs)

    @property
    def overlaps(self) -> bool:
        return self.size % self.outputs != 0


@dataclass(frozen=True, slots=True)
class Resized(Along):
    """Output i reads around input `scale i + offset`: its floor, `before` more before and `after` after it.

    Past the border the last input is repeated, and no position lies before the first. Kernels compute it in
    float32, which may land on either side of an integer: both sides are counted.
    """

    scale: float
    offset: float = 0.0
    before: int = 0
    after: int = 0

    def needs(self, outputs: Span) -> Span:
        low, high = (self.scale * index + self.offset for index in (outputs[0], outputs[1] - 1))
        first = floor(low - self._slack(low)) - self.before
        last = floor(max(0.0, high + self._slack(high))) + self.after
        return min(max(0, first), self.size - 1), min(max(0, last), self.size - 1) + 1

    def _slack(self, position: float) -> float:
        return 1e-6 * (abs(position) + abs(self.offset) + 1)


@dataclass(frozen=True, slots=True)
class Bordered(Along):
    """A pad of `before` entries whose border repeats the last input, or mirrors the adjacent inputs."""

    before: int
    mirrors: bool

    def needs(self, outputs: Span) -> Span:
        low, high = outputs[0] - self.before, outputs[1] - 1 - self.before
        turns = [edge for edge in (0, self.size - 1) if low <= edge <= high]
        sources = [self._source(position) for position in (low, high, *turns)]
        return min(sources), max(sources) + 1

    def narrow(self, outputs: Rect, inputs: Span) -> Rect:
        """Of a mirror, the outputs that copy `inputs` in place; all of them where all inputs are there."""
        if not self.mirrors:
            return Along.narrow(self, outputs, inputs)
        if inputs[0] <= 0 and inputs[1] >= self.size:
            return outputs
        low, high = max(0, inputs[0]) + self.before, min(self.size, inputs[1]) + self.before
        span = max(low, outputs.lo[self.dim]), min(high, outputs.hi[self.dim])
        return with_span(outputs, self.dim, span)

    def _source(self, position: int) -> int:
        last = self.size - 1
        if self.mirrors:
            return abs(position) if position <= last else 2 * last - position
        return min(max(0, position), last)


@dataclass(frozen=True, slots=True)
class Always:
    """The same indices of an input dim of `size`, whatever the output."""

    size: int
    span: Span

    def pull(self, _: Rect) -> Span:
        return self.span

    def narrow(self, outputs: Rect, inputs: Span) -> Rect:
        is_there = inputs[0] <= self.span[0] and inputs[1] >= self.span[1]
        return outputs if is_there else emptied(outputs)

    def kind_of(self, _: int) -> DimKind:
        return DimKind.SHARED


@dataclass(frozen=True, slots=True)
class Digit:
    """One digit of the flat index over the output dims `dims`: `(flat + shift) // below % size`.

    A reshape reads its input's dims as digits of the same flat index; a roll or a repeat is the last digit
    of one dim. A span that passes the turn of the digit needs all of it.
    """

    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    below: int
    size: int
    shift: int = 0

    def pull(self, outputs: Rect) -> Span:
        first, last = (bound // self.below for bound in self._flat(outputs))
        if last - first >= self.size or last % self.size < first % self.size:
            return 0, self.size
        return first % self.size, last % self.size + 1

    def narrow(self, outputs: Rect, inputs: Span) -> Rect:
        """Outputs of the first turn of the digit that `inputs` has something for."""
        low, high = max(0, inputs[0]), min(self.size, inputs[1])
        if (low, high) == (0, self.size) or outputs.is_empty:
            return outputs
        turn, position = divmod(self._flat(outputs)[0] // self.below, self.size)
        turn += position >= high
        start, stop = ((turn * self.size + bound) * self.below - self.shift for bound in (low, high))
        return self._between(outputs, start, stop)

    def kind_of(self, dim: int) -> DimKind:
        if dim not in self.dims:
            return DimKind.SHARED
        is_all = self.below == 1 and self.size == prod(self.sizes) and not self.shift
        return DimKind.FREE if is_all and dim == self.dims[0] else DimKind.HALO

    def _flat(self, outputs: Rect) -> Span:
        """The flat index of the first and the last point, both included."""
        first = last = 0
        for dim, size in zip(self.dims, self.sizes, strict=True):
            first, last = first * size + outputs.lo[dim], last * size + outputs.hi[dim] - 1
        return first + self.shift, last + self.shift

    def _between(self, outputs: Rect, start: int, stop: int) -> Rect:
        """The part of `outputs` in whole rows, as far out as there is one, of flat indices [start, stop)."""
        for position, dim in enumerate(self.dims):
            row = prod(self.sizes[position + 1 :])
            span = max(outputs.lo[dim], -(-start // row)), min(outputs.hi[dim], stop // row)
            if span[0] < span[1] or row == 1:
                return with_span(outputs, dim, span)
            index = max(outputs.lo[dim], start // row)
            outputs = with_span(outputs, dim, (index, min(index + 1, outputs.hi[dim])))
            start, stop = start - index * row, stop - index * row
        return outputs
