"""Checks: what a step asks about values that no argument determines, and takes for granted.

`if not torch.isfinite(h).all(): raise ...` reads a value that does not exist before the step runs. Where one
of the two answers does nothing but raise, the step is captured with the other. What was asked becomes one
more output of the step, and each call looks at it: the error that eager would raise is raised when forward
ends. A step that asks whether all numbers are finite, and goes another way if not, is captured for finite
numbers; other numbers raise NotFinite.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from torch import Tensor

from stowplan.torch_private import pytree


@dataclass(frozen=True, slots=True)
class Check:
    """The answer that a step was captured with, and the error that the other answer raises."""

    expected: bool
    error: Exception

    @staticmethod
    def of(error: Exception, *, expected: bool) -> "Check":
        """Without the frames that the error passed through, which hold tensors."""
        bare = copy(error).with_traceback(None)
        bare.__context__ = bare.__cause__ = None
        return Check(expected, bare)


@dataclass(frozen=True, slots=True)
class Checked:
    """What a model returns, with what its checks asked."""

    returned: object
    asked: tuple[Tensor, ...]
    checks: tuple[Check, ...]

    def passed(self) -> object:
        """What the model returns; the error of the first check that fails."""
        for tensor, check in zip(self.asked, self.checks, strict=True):
            if bool(tensor) is not check.expected:
                raise copy(check.error)
        return self.returned


def unchecked(returned: object) -> object:
    """What the model itself returns."""
    return returned.returned if isinstance(returned, Checked) else returned


def checked(returned: object, asked: Sequence[tuple[Tensor, Check]]) -> object:
    """What a step returns, with its checks if it has any."""
    if not asked:
        return returned
    return Checked(returned, tuple(tensor for tensor, _ in asked), tuple(check for _, check in asked))


pytree.register_pytree_node(
    Checked,
    lambda found: ([found.returned, *found.asked], found.checks),
    lambda children, checks: Checked(next(iter(children)), tuple(children)[1:], checks),
)
