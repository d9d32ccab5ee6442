"""Draws of which a worker needs a part: made piece by piece, so that the whole is never there.

Numbers follow each other: those before and after the part are drawn as well or, if they are many, skipped.
The generator ends where it does in one process. This holds where PyTorch draws the same numbers in pieces as
at once, and where its generator is as expected, both of which is tried.
"""

from collections.abc import Sequence
from functools import cache
from math import prod

import torch
from torch import Tensor

from stowplan.run.parts.part import LocalCall
from stowplan.techniques.shards.plan.projection import LEAST_SKIPPED
from stowplan.techniques.shards.run.skip_ahead import skip_ahead

PIECE = 2**16
"""Elements that are drawn at once."""

_WORDS_EACH = 2  # of the generator, for a number that is drawn
_BERNOULLI = torch.ops.aten.bernoulli.p


def is_drawn_in_pieces(call: LocalCall, device: str) -> bool:
    """Whether a part of what the call draws can be had without the whole."""
    plain = call.target is _BERNOULLI and call.arguments.get("generator") is None
    return plain and device == "cpu" and _go_on()


@cache
def _go_on() -> bool:
    sizes = (37, 1000, 3 * PIECE + 5)
    first, second = (torch.Generator().manual_seed(1) for _ in range(2))
    pieces = [torch.empty(size).bernoulli_(0.5, generator=first) for size in sizes]
    whole = _BERNOULLI(torch.empty(sum(sizes)), 0.5, generator=second)
    return torch.equal(torch.cat(pieces), whole) and torch.equal(first.get_state(), second.get_state())


@cache
def _can_skip(dtype: torch.dtype) -> bool:
    """Whether skipped numbers leave the generator as drawn ones do."""
    before, count = torch.get_rng_state(), 4321
    try:
        torch.empty(count, dtype=dtype).bernoulli_(0.5)
        drawn = torch.get_rng_state()
        torch.set_rng_state(before)
        skip_ahead(_WORDS_EACH * count)
        return torch.equal(torch.get_rng_state(), drawn)
    finally:
        torch.set_rng_state(before)


# The schema is written out: PyTorch 2.6 does not read `list[int]` in a signature.
@torch.library.custom_op(
    "stowplan::draw",
    mutates_args=(),
    schema="(float p, SymInt[] whole, SymInt[] low, SymInt[] sizes, ScalarType dtype) -> Tensor",
)
def _draw(p: float, whole: list[int], low: list[int], sizes: list[int], dtype: torch.dtype) -> Tensor:
    made = torch.empty(sizes, dtype=dtype)
    numbers = _Numbers(p, made.new_empty(min(PIECE, prod(whole))))
    if made.numel():
        _fill(made, whole, low, numbers)
    else:
        numbers.pass_over(prod(whole))
    numbers.end()
    return made


@_draw.register_fake
def _(p: float, whole: list[int], low: list[int], sizes: list[int], dtype: torch.dtype) -> Tensor:
    del p, whole, low
    return torch.empty(sizes, dtype=dtype)


class _Numbers:
    """Random numbers one after the other, some of which are only passed over; they are drawn in `room`."""

    def __init__(self, p: float, room: Tensor) -> None:
        self._p, self._room, self._passed = p, room, 0

    def pass_over(self, count: int) -> None:
        """Nobody needs the next ones."""
        self._passed += count

    def draw(self, count: int) -> Tensor:
        """The next ones."""
        self.end()
        return self._room[:count].bernoulli_(self._p)

    def end(self) -> None:
        """Leave the generator after those that were passed over."""
        count, self._passed = self._passed, 0
        if count >= LEAST_SKIPPED and _can_skip(self._room.dtype):
            skip_ahead(_WORDS_EACH * count)
            return
        for first in range(0, count, len(self._room)):
            self._room[: count - first].bernoulli_(self._p)


def _fill(part: Tensor, whole: Sequence[int], low: Sequence[int], numbers: _Numbers) -> None:
    """Draw a part that begins at `low`, and pass over the rest of `whole`, in order."""
    across = prod(whole[1:])
    numbers.pass_over(low[0] * across)
    if across > PIECE:
        for row in part:
            _fill(row, whole[1:], low[1:], numbers)
    else:
        kept = tuple(slice(first, first + size) for first, size in zip(low[1:], part.shape[1:], strict=True))
        for rows in torch.split(part, max(1, PIECE // across)):
            drawn = numbers.draw(len(rows) * across).view(len(rows), *whole[1:])
            rows.copy_(drawn[(slice(None), *kept)])
    numbers.pass_over((whole[0] - low[0] - len(part)) * across)
