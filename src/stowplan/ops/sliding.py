"""Window: which inputs a sliding kernel reads for which outputs, one dim at a time, on half-open spans.

Convolutions and pools, and their transposes, are products of such windows over their spatial dims. Spans are
unclamped: what reaches below 0 or past the tensor is padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stowplan.errors import BadUse
from stowplan.geometry import Rect

Span: TypeAlias = tuple[int, int]
_NOTHING: Span = (0, 0)


@dataclass(frozen=True, slots=True)
class Window:
    """Output i of a plain window reads inputs `stride i - before + dilation j`, j = 0 .. kernel-1.

    A transposed one runs that relation backwards: input i adds into those outputs. `after` only decides how
    many outputs there are; it may be negative (an output that stops early) or larger than `before`.
    """

    kernel: int = 1
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1
    transposed: bool = False

    def __post_init__(self) -> None:
        if min(self.kernel, self.stride, self.dilation) < 1:
            raise BadUse(
                f"a window of kernel {self.kernel}, stride {self.stride}, dilation {self.dilation}: "
                "each must be at least 1"
            )

    @property
    def extent(self) -> int:
        """Inputs from the first to the last one under the kernel."""
        return self.dilation * (self.kernel - 1) + 1

    def pull(self, outputs: Span) -> Span:
        """The inputs needed to produce `outputs`."""
        return self._met(outputs) if self.transposed else self._spread(outputs)

    def reach(self, inputs: Span) -> Span:
        """The outputs that read any of `inputs`: where their gradient comes from."""
        return self._spread(inputs) if self.transposed else self._met(inputs)

    def push(self, inputs: Span) -> Span:
        """The outputs that `inputs` alone suffice to produce. Give it the padding too, where it applies."""
        low, high = inputs
        if high <= low:
            return _NOTHING
        if self.transposed:
            return (low - 1) * self.stride - self.before + self.extent, high * self.stride - self.before
        first = -((-low - self.before) // self.stride)
        return first, (high + self.before - self.extent) // self.stride + 1

    def output_size(self, inputs: int) -> int:
        """How many outputs `inputs` inputs make."""
        if self.transposed:
            return max(0, self.stride * (inputs - 1) + self.extent - self.before - self.after)
        return max(0, (inputs + self.before + self.after - self.extent) // self.stride + 1)

    def _spread(self, span: Span) -> Span:
        low, high = span
        if high <= low:
            return _NOTHING
        return low * self.stride - self.before, (high - 1) * self.stride - self.before + self.extent

    def _met(self, span: Span) -> Span:
        low, high = span
        if high <= low:
            return _NOTHING
        first = -((self.extent - 1 - low - self.before) // self.stride)
        return first, (high - 1 + self.before) // self.stride + 1


def pull(windows: Sequence[Window], outputs: Rect) -> Rect:
    """The input rect needed for an output rect, over the windows' dims."""
    return _rect([w.pull(span) for w, span in zip(windows, _spans(outputs), strict=True)])


def reach(windows: Sequence[Window], inputs: Rect) -> Rect:
    """The output rect that reads any of an input rect."""
    return _rect([w.reach(span) for w, span in zip(windows, _spans(inputs), strict=True)])


def push(windows: Sequence[Window], inputs: Rect) -> Rect:
    """The output rect that an input rect alone suffices to produce."""
    return _rect([w.push(span) for w, span in zip(windows, _spans(inputs), strict=True)])


def output_sizes(windows: Sequence[Window], inputs: Sequence[int]) -> tuple[int, ...]:
    """The output's spatial sizes from the input's."""
    return tuple(w.output_size(size) for w, size in zip(windows, inputs, strict=True))


def _spans(rect: Rect) -> list[Span]:
    return list(zip(rect.lo, rect.hi, strict=True))


def _rect(spans: list[Span]) -> Rect:
    return Rect(tuple(low for low, _ in spans), tuple(high for _, high in spans))
