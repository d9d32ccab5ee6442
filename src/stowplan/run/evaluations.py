"""Evaluations: calls without gradients of a fitted module, and which of them fit the budget as they are.

A call is captured, which shows what it takes without allocating anything. Such a capture serves many calls of
the same program: one with no larger tensor or number takes no more. What a larger one takes beyond
parameters and buffers is taken to grow with the square of its elements at most, as attention does. So a loop
whose calls grow, such as one that generates text, is captured a few times and not at each call.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from torch import nn

from stowplan.capture.answers import NO_ANSWERS
from stowplan.capture.composite import opened
from stowplan.capture.stand_ins import TensorLook
from stowplan.run.border.guard import Dependencies, Guard

if TYPE_CHECKING:
    from stowplan.run.call_planner import KindOfCall

_MOST_SEEN = 32  # captured calls of one module; the oldest makes room


@dataclass(frozen=True, slots=True)
class CallExtent:
    """A call as its family, which is equal for calls that differ in sizes and numbers alone, and these."""

    family: object
    amounts: tuple[float, ...]

    @staticmethod
    def of(kind: "KindOfCall") -> "CallExtent":
        """A tensor's amount is the number of its elements."""
        family, amounts = list[object](), list[float]()
        for look in kind.looks:
            if isinstance(look, TensorLook):
                family.append((len(look.shape), look.dtype, look.device))
                amounts.append(prod(look.shape))
            elif isinstance(look, tuple) and look[0] in (int, float):
                family.append(look[0])
                amounts.append(abs(look[1] if look[0] is int else float.fromhex(look[1])))
            else:
                family.append(look)
        return CallExtent((tuple(family), kind.spec, kind.casts, kind.records, kind.infers), tuple(amounts))

    def share_of(self, other: "CallExtent") -> float:
        """How many times as large it is, in the tensor or number that grew most; no less than 1."""
        pairs = zip(self.amounts, other.amounts, strict=True)
        return max((one / max(1.0, largest) for one, largest in pairs), default=1.0)


@dataclass(slots=True)
class _Seen:
    """A captured call, what it takes as it is, and the program that it was a call of."""

    extent: CallExtent
    peak_bytes: int
    guard: Guard

    def is_program(self, leaves: Sequence[object]) -> bool:
        return self.guard.is_untouched(leaves) or self.guard.change(leaves) is None


@dataclass(slots=True)
class Evaluations:
    """Those of one module that were captured, the latest first."""

    seen: list[_Seen] = field(default_factory=list)
    refused: list[tuple[CallExtent, bool]] = field(default_factory=list)  # and whether for any size

    def add(self, kind: "KindOfCall", model: nn.Module, peak_bytes: int, known: Dependencies) -> None:
        """A call of this kind takes so much as it is."""
        guard = Guard(replace(known, answers=NO_ANSWERS), model)
        self.seen = [_Seen(CallExtent.of(kind), peak_bytes, guard), *self.seen][:_MOST_SEEN]

    def add_refused(self, kind: "KindOfCall", *, at_any_size: bool) -> None:
        """Calls of this kind run as they are, for they cannot be captured, or no plan fits."""
        self.refused = [(CallExtent.of(kind), at_any_size), *self.refused][:_MOST_SEEN]

    def refuse(self, kind: "KindOfCall") -> bool:
        """Whether such a call was refused, or one that is no larger."""
        extent = CallExtent.of(kind)
        alike = (each for each in self.refused if each[0].family == extent.family)
        return any(at_any_size or known.share_of(extent) <= 1 for known, at_any_size in alike)

    def fit(self, kind: "KindOfCall", model: nn.Module, leaves: Sequence[object], allowed_bytes: int) -> bool:
        """Whether a call fits as it is, as far as those that were captured show."""
        extent = CallExtent.of(kind)
        fixed = sum(tensor.nbytes for tensor in opened((*model.parameters(), *model.buffers())))
        for each in self.seen:
            if each.extent.family == extent.family:
                share = max(1.0, extent.share_of(each.extent))
                if fixed + (each.peak_bytes - fixed) * share**2 <= allowed_bytes and each.is_program(leaves):
                    return True
        return False
