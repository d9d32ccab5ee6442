"""Steps whose kernels leave results in larger storages stay within their budgets, with the bits of eager."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stowplan.run.fit import plans_of
from tests.support.side_by_side import differences_at_both_ends, fitted_at_both_ends, measured_peak

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.usefixtures("one_thread")]


def folds(x: Tensor, w: Tensor) -> Tensor:
    h = x * w
    for _ in range(2):
        h = F.fold(F.unfold(h, 3, padding=1), (8, 8), 3, padding=1) / 9
    return h.sum()


def strided_windows(x: Tensor, w: Tensor) -> Tensor:
    return F.unfold((x * w).sigmoid(), 1, stride=3).sigmoid().sum()


def squares(x: Tensor, w: Tensor) -> Tensor:
    return sum((F.mse_loss(x * w * k, x) for k in range(1, 5)), torch.zeros(()))


def several_losses(x: Tensor, w: Tensor) -> Tensor:
    smooth = F.smooth_l1_loss(x * w, x) + F.soft_margin_loss(x + w, x.sign())
    return smooth + F.binary_cross_entropy((x * w).sigmoid(), x.sigmoid()) + F.mse_loss(x + w, x)


class Applied(nn.Module):
    """A function of the input and a parameter."""

    def __init__(self, apply: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.1, 1, 6).reshape(6, 1, 1))
        self.apply_to = apply

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_to(x, self.w)


@pytest.mark.parametrize("apply", [folds, strided_windows, squares, several_losses])
def test_budgets_hold(apply: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Applied(apply), torch.randn(2, 6, 8, 8)
    for budget, fitted in fitted_at_both_ends(model, (x,)):
        (plan,) = plans_of(fitted)
        measured = measured_peak(fitted, (x,))
        assert measured <= budget
        assert measured == pytest.approx(plan.projected_peak_bytes, abs=32)
    assert differences_at_both_ends(model, (x,)) == []
