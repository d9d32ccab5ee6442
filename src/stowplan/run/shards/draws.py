"""Draws of which a worker needs a part: made piece by piece, so that the whole is never there.

Numbers follow each other: those before and behind the part are drawn as well, and the generator ends where it
does in one process. This holds where PyTorch draws the same numbers in pieces as at once, which is tried.
"""

from collections.abc import Sequence
from functools import cache
from math import prod

import torch
from torch import Tensor

from stowplan.run.parts.part import LocalCall

PIECE = 2**16
"""Elements that are drawn at once."""

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


# The schema is written out: PyTorch 2.6 does not read `list[int]` in a signature.
@torch.library.custom_op(
    "stowplan::draw",
    mutates_args=(),
    schema="(float p, SymInt[] whole, SymInt[] low, SymInt[] sizes, ScalarType dtype) -> Tensor",
)
def _draw(p: float, whole: list[int], low: list[int], sizes: list[int], dtype: torch.dtype) -> Tensor:
    made = torch.empty(sizes, dtype=dtype)
    _fill(made, p, whole, low, made.new_empty(min(PIECE, prod(whole))))
    return made


@_draw.register_fake
def _(p: float, whole: list[int], low: list[int], sizes: list[int], dtype: torch.dtype) -> Tensor:
    del p, whole, low
    return torch.empty(sizes, dtype=dtype)


def _fill(part: Tensor | None, p: float, whole: Sequence[int], low: Sequence[int], room: Tensor) -> None:
    """Draw all of `whole` in order, piece by piece; `part` begins at `low`, and None keeps nothing."""
    across = prod(whole[1:])
    step = max(1, PIECE // max(1, across))
    for first in range(0, whole[0], step):
        last = min(whole[0], first + step)
        kept = None if part is None else _rows(part, first - low[0], last - low[0])
        if across > PIECE:
            _fill(None if kept is None else kept[0], p, whole[1:], low[1:], room)
            continue
        drawn = room[: (last - first) * across].view(last - first, *whole[1:]).bernoulli_(p)
        if kept is not None:
            begin = max(first, low[0]) - first
            index = (slice(begin, begin + len(kept)), *map(slice, low[1:], _ends(low[1:], kept.shape[1:])))
            kept.copy_(drawn[index])


def _rows(part: Tensor, first: int, last: int) -> Tensor | None:
    """Those of a part that are from `first` to `last`, which may be outside."""
    begin, end = max(0, first), min(len(part), last)
    return part[begin:end] if begin < end else None


def _ends(low: Sequence[int], sizes: Sequence[int]) -> list[int]:
    return [first + size for first, size in zip(low, sizes, strict=True)]
