"""Relation: what a rect of an op's output needs of each input, as a product of one map per input dim.

All rects are half-open and in global coordinates. What an output needs of an input may reach past the input's
border: that part is padding, of the value `Need.fill`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Protocol

from stowplan.geometry import Rect
from stowplan.ir import Shape
from stowplan.ops.windows import Span


class DimKind(IntEnum):
    """The effect of cutting an output dim on the inputs that tiles need, from harmless to useless."""

    SHARED = 0  # every tile needs the same: nothing follows this dim
    FREE = 1  # tiles need disjoint parts
    HALO = 2  # neighbouring tiles need overlapping parts
    WHOLE = 3  # every tile needs everything, because the op runs over this dim


class DimMap(Protocol):
    """How far along one dim of an input, of this size, an output rect must see."""

    @property
    def size(self) -> int:
        """How many indices the input dim has."""

    def pull(self, outputs: Rect) -> Span:
        """The indices needed to produce `outputs`."""

    def narrow(self, outputs: Rect, inputs: Span) -> Rect:
        """A part of `outputs`, as large as the map can tell, for which the indices `inputs` suffice."""

    def kind_of(self, dim: int) -> DimKind:
        """The effect of cutting output dim `dim` on this input dim."""


@dataclass(frozen=True, slots=True)
class Need:
    """How one input follows from an output rect.

    `fill` is the value of what lies past the input's border. With `within` = (dim, span), only outputs whose
    index along dim lies in the span need this input at all: a part of a concatenation, say.
    """

    dims: tuple[DimMap, ...]
    fill: float | None = None
    within: tuple[int, Span] | None = None

    def pull(self, outputs: Rect) -> Rect | None:
        """The rect needed for `outputs`; None where nothing is."""
        part = self._part(outputs)
        if part.is_empty:
            return None
        spans = [dim_map.pull(part) for dim_map in self.dims]
        rect = Rect(tuple([low for low, _ in spans]), tuple([high for _, high in spans]))
        return None if rect.is_empty else rect

    def narrow(self, outputs: Rect, inputs: Rect | None) -> Rect:
        """A part of `outputs` for which `inputs` suffices."""
        if inputs is None:
            return self._without_part(outputs)
        narrowed = outputs
        for dim, dim_map in enumerate(self.dims):
            narrowed = dim_map.narrow(narrowed, (inputs.lo[dim], inputs.hi[dim]))
        return self._without_part(outputs) if narrowed.is_empty else self._bridged(outputs, narrowed)

    def kind_of(self, dim: int) -> DimKind:
        """The effect of cutting output dim `dim` on this input."""
        return max((dim_map.kind_of(dim) for dim_map in self.dims), default=DimKind.SHARED)

    def _part(self, outputs: Rect) -> Rect:
        if self.within is None:
            return outputs
        dim, (low, high) = self.within
        return with_span(outputs, dim, (max(low, outputs.lo[dim]), min(high, outputs.hi[dim])))

    def _without_part(self, outputs: Rect) -> Rect:
        """The outputs on one side of the part that needs this input: the larger one."""
        if self.within is None:
            return emptied(outputs)
        dim, (low, high) = self.within
        before = with_span(outputs, dim, (outputs.lo[dim], min(low, outputs.hi[dim])))
        after = with_span(outputs, dim, (max(high, outputs.lo[dim]), outputs.hi[dim]))
        return max(before, after, key=lambda rect: rect.volume)

    def _bridged(self, outputs: Rect, narrowed: Rect) -> Rect:
        """`narrowed`, reaching on over outputs that do not need this input where it meets them."""
        if self.within is None:
            return narrowed
        dim, (low, high) = self.within
        start = outputs.lo[dim] if narrowed.lo[dim] <= low else narrowed.lo[dim]
        stop = outputs.hi[dim] if narrowed.hi[dim] >= high else narrowed.hi[dim]
        return with_span(narrowed, dim, (start, stop))


class Partial(StrEnum):
    """The partial result of a tile of a reduced dim, and how the partial results of all tiles merge."""

    SUM = "sum"  # sums add up
    MEAN = "mean"  # sums and counts (or weights) add up, then divide
    MAX = "max"
    MIN = "min"
    MOMENTS = "moments"  # count, mean and sum of squared deviations, merged pairwise


@dataclass(frozen=True, slots=True)
class Reduction:
    """Input dims that an op runs over, exactly computable tile by tile through merged partials.

    `dims` holds by input position the dims reduced, matching in order; None where an input is broadcast over
    one. `after` is what an output rect needs once the merged partial is known; None where that partial is the
    output itself.
    """

    partial: Partial
    dims: Mapping[int, tuple[int | None, ...]]
    after: "Relation | None" = None


@dataclass(frozen=True, slots=True)
class Relation:
    """The parts of an op's inputs that one output needs; None for an input whose values it does not read.

    `whole` says by output dim, as a sentence, why tiles of that dim would each need everything.
    """

    shape: Shape
    needs: tuple[Need | None, ...]
    whole: Mapping[int, str] = field(default_factory=dict)
    reduction: Reduction | None = None

    def pull(self, outputs: Rect) -> tuple[Rect | None, ...]:
        """Per input, what is needed for `outputs`. Only outputs inside the tensor are ever computed."""
        inside = outputs.clip(self.shape)
        if inside.is_empty:
            return (None,) * len(self.needs)
        return tuple([None if need is None else need.pull(inside) for need in self.needs])

    def push(self, inputs: Sequence[Rect | None]) -> Rect | None:
        """Outputs that these parts of the inputs suffice to produce: a rect, though not always the largest.

        None for a part means that nothing of that input is there; None as the answer, that nothing can be
        produced.
        """
        outputs = Rect.of_shape(self.shape)
        for need, part in zip(self.needs, inputs, strict=True):
            outputs = outputs if need is None else need.narrow(outputs, part)
        return outputs if not outputs.is_empty and self._suffice(inputs, outputs) else None

    def _suffice(self, inputs: Sequence[Rect | None], outputs: Rect) -> bool:
        """Whether everything that `outputs` needs, and that is not padding, is there."""
        return all(
            need is None
            or (needed := need.pull(outputs)) is None
            or (part is not None and part.contains(needed.clip([dim_map.size for dim_map in need.dims])))
            for need, part in zip(self.needs, inputs, strict=True)
        )

    def kind_of(self, dim: int) -> DimKind:
        """The worst effect of cutting output dim `dim` on any input."""
        if dim in self.whole:
            return DimKind.WHOLE
        return max((need.kind_of(dim) for need in self.needs if need), default=DimKind.SHARED)

    def kinds(self) -> tuple[DimKind, ...]:
        """The kind of every output dim."""
        return tuple(map(self.kind_of, range(len(self.shape))))


@dataclass(frozen=True, slots=True)
class Regions:
    """The relation of each output of an op. `barrier` says why the op can only be computed whole, if so."""

    outputs: tuple[Relation, ...]
    barrier: str = ""


def emptied(rect: Rect) -> Rect:
    """`rect` without its points; one of no dims has a single point, which stays."""
    return with_span(rect, 0, (0, 0)) if rect.ndim else rect


def with_span(rect: Rect, dim: int, span: Span) -> Rect:
    """`rect` with another extent along one dim."""
    low, high = span
    return Rect((*rect.lo[:dim], low, *rect.lo[dim + 1 :]), (*rect.hi[:dim], high, *rect.hi[dim + 1 :]))
