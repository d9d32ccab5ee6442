"""Backward is compared with eager's own, bit by bit, for values that formulas of autograd treat differently.

The values are realistic, rounded so that some are equal, zero in places, infinite and NaN; gradients come in
positive, negative, and infinite.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stowplan
from stowplan import Search

MASK = (torch.arange(30) % 4 > 0).view(6, 5)
PLACES = (torch.arange(30) % 3).view(6, 5)

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "prod": lambda w: w.prod(),
    "prod of rows": lambda w: torch.prod(w, 1),
    "prod that keeps its dim": lambda w: w.prod(dim=0, keepdim=True),
    "prod in another dtype": lambda w: w.prod(1, dtype=torch.float64),
    "prod of a transposed tensor": lambda w: w.T.prod(0),
    "masked prod": lambda w: torch.masked.prod(w, 1, mask=MASK),
    "max": lambda w: w.max(),
    "min": lambda w: torch.min(w),
    "median": lambda w: w.median(),
    "nanmedian": lambda w: torch.nanmedian(w),
    "masked_fill by a tensor": lambda w: w.masked_fill(MASK, w[0, 0]),
    "masked_fill of a constant": lambda w: torch.zeros(6, 5).masked_fill(MASK, value=w[1, 1]),
    "cumprod": lambda w: w.cumprod(1),
    "amax": lambda w: w.amax(1),
    "max of rows": lambda w: w.max(1).values,
    "maximum": lambda w: torch.maximum(w, w.flip(0)),
    "norm": lambda w: w.norm(),
    "norm of rows": lambda w: w.norm(dim=1),
    "where": lambda w: torch.where(w > 0, w, w * 2),
    "masked_select": lambda w: w.masked_select(MASK),
    "scatter_reduce": lambda w: torch.ones(6, 5).scatter_reduce(0, PLACES, w, "prod"),
    "logsumexp": lambda w: w.logsumexp(1),
    "std": lambda w: w.std(1),
    "det": lambda w: torch.linalg.det(w[:5]),
}


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(6, 5))

    def forward(self, x: Tensor, size: Tensor) -> Tensor:
        made = self.function(self.weight * x)
        return (made * made.detach().nan_to_num(1.0, 2.0, 2.0) * size).sum()


def values() -> Iterator[Tensor]:
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    yield x.clone()
    x[0, 0] = 0.0
    yield x.clone()
    x[0, 1] = 0.0
    x[2] = 0.0
    yield x.clone()
    yield x.round()
    x[1, 1] = float("inf")
    yield x.clone()
    x[3, 3] = float("nan")
    yield x.clone()


def outcome(model: Any, x: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    loss = model(x, size)
    loss.backward()
    return loss.detach(), model.weight.grad.clone()


def bits(value: Tensor) -> bytes:
    """A NaN has many patterns, and which one an op gives is not defined."""
    return value.nan_to_num(7.0, float("inf"), float("-inf")).numpy().tobytes()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_backward_has_the_bits_of_eagers_own(name: str) -> None:
    eager, planned = Net(FUNCTIONS[name]), Net(FUNCTIONS[name])
    size = torch.tensor(1.0)
    fitted = stowplan.fit(
        planned, (next(values()), size), budget="1GiB", search=Search(moves=1), allow=("recompute",)
    )
    assert stowplan.plans_of(fitted)[0].exactness == "bitwise"
    for x, scale in itertools.product(values(), (1.0, -1.0, float("inf"))):
        expected = outcome(eager, x, size * scale)
        assert [*map(bits, expected)] == [*map(bits, outcome(fitted, x, size * scale))]
