"""Buffers that forward changes: every reader, also through a view, sees the contents that eager would see."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import stowplan
from stowplan import Search
from tests.support.side_by_side import differences_at_both_ends

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]


def view_of_new_contents(model: "Buffered", x: Tensor) -> Tensor:
    model.buffer.add_(x.mean())
    return (x * model.w * model.buffer[0]).sum()


def view_of_a_view_of_new_contents(model: "Buffered", x: Tensor) -> Tensor:
    rows = model.buffer.add_(x.mean()).view(3, 1)
    return (x.exp() * model.w * rows[1:].view(-1)[0]).sigmoid().sum()


def several_updates(model: "Buffered", x: Tensor) -> Tensor:
    model.buffer.mul_(0.9).add_(x.mean(), alpha=0.1)
    return (x * model.w / (1 + model.buffer.sum())).sum()


def update_that_nobody_reads(model: "Buffered", x: Tensor) -> Tensor:
    model.buffer += 1
    return (x * model.w).sum()


def view_of_old_contents(model: "Buffered", x: Tensor) -> Tensor:
    """Recomputing the product after the update would read the new contents through the view."""
    h = (x * model.buffer[0]).exp() * model.w
    for _ in range(4):
        h = torch.sigmoid(h * 1.5)
    model.buffer.add_(1)
    return h.sum()


def views_before_and_after(model: "Buffered", x: Tensor) -> Tensor:
    old = (x * model.buffer[1:].view(-1)[0]).tanh()
    model.buffer.mul_(1.5)
    return (old * model.w * model.buffer[2]).sigmoid().sum()


class Buffered(nn.Module):
    """Applies a function to itself and its input."""

    def __init__(self, apply: Callable[["Buffered", Tensor], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.1, 1, 32))
        self.buffer: Tensor
        self.register_buffer("buffer", torch.ones(3))
        self.apply_to = apply

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_to(self, x)


@pytest.mark.parametrize(
    "apply",
    [
        view_of_new_contents,
        view_of_a_view_of_new_contents,
        several_updates,
        update_that_nobody_reads,
        view_of_old_contents,
        views_before_and_after,
    ],
)
@pytest.mark.slow
def test_readers_see_what_eager_sees(apply: Callable[[Buffered, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    assert differences_at_both_ends(Buffered(apply), (torch.randn(32, 32),), steps=3) == []


class DrawingIntoAPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        mask = x.clone()
        mask[:, ::2].transpose(0, 1).bernoulli_(0.5)  # numbers are drawn in the order in which elements lie
        return (mask[:, ::2].transpose(0, 1) * self.weight).sum()


def test_numbers_drawn_into_a_part_are_eagers() -> None:
    model, x = DrawingIntoAPart(), torch.zeros(6, 8)
    fitted = stowplan.fit(model, (x,), budget="1GiB", allow=("recompute",), search=Search(moves=10))
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    assert torch.equal(fitted(x), expected)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return (x * self.weight / self.count).sum()


def test_a_buffer_from_inference_mode_is_refused_by_name() -> None:
    """The planned step writes updates in place, which such tensors forbid."""
    x = torch.randn(3, 4)
    fitted = stowplan.fit(Counting(), (x,), budget="1GiB", allow=("recompute",), search=Search(moves=3))
    fitted(x).backward()
    with torch.inference_mode():
        fitted(x)
    with pytest.raises(stowplan.BadUse, match=r"'count' was made in inference mode.*clone"):
        fitted(x)
    fitted.count = fitted.count.clone()
    assert torch.equal(fitted(x), (x * fitted.weight / 3).sum())
