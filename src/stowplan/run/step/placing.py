"""Placing: where the results of a step lie. PyTorch's allocator decides, or a technique does."""

from collections.abc import Callable, Collection, Iterable, Mapping

from torch import Tensor

from stowplan.capture import Call
from stowplan.ir import Op
from stowplan.run.step.literals import call_lines


class Placing:
    """What a technique writes into the code of a step, which reaches it by the name `placing`.

    By default PyTorch's allocator places everything. Methods that write are called in the order of the steps.
    """

    begun_with: Mapping[str, str] = {}
    """Variables that both halves have, and the expressions that forward begins with to make them."""

    only_one_backward = ""
    """Why a backward may not be followed by another one of the same forward, where it may not."""

    def lines(
        self,
        op: Op,  # noqa: ARG002 -- for techniques
        call: Call,
        overwrites: Mapping[str, str],
        names: Mapping[str, str],
        wanted: Collection[str],  # noqa: ARG002 -- for techniques
    ) -> list[str]:
        """The statements that run `call`, whose `wanted` outputs stay."""
        return call_lines(call, overwrites, names)

    def around(self, op: Op, lines: list[str], names: Mapping[str, str]) -> list[str]:  # noqa: ARG002 -- same
        """The statements that run an op, with others around them."""
        return lines

    def begins(self, given: Iterable[Tensor], say_once: Callable[[str], None] | None) -> None:
        """A forward is about to run with the tensors in `given`; `say_once` warns of what it meets."""


BY_ALLOCATOR = Placing()
