"""Strides that PyTorch's shape functions have wrong: steps that write by them follow the kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stowplan
from stowplan.capture import layouts
from stowplan.errors import BudgetTooSmall


class Rolling(nn.Module):
    """`roll` keeps channels last, which its shape function does not say; then every other row is doubled."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 1, 1, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        rolled = x.roll(-1, 3)
        doubled = rolled + 1
        doubled[:, :, ::2] *= 2.0
        return (F.leaky_relu(doubled, 0.1) * self.weight).square().mean()


@pytest.mark.parametrize("share", [0.0, 10.0], ids=["smallest budget", "roomy"])
@pytest.mark.slow
def test_a_write_into_a_part_goes_where_the_kernel_has_it(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "_LEARNED", {})
    monkeypatch.setattr(layouts, "_seen", set())
    x = torch.randn(1, 8, 4, 4).to(memory_format=torch.channels_last)
    model = Rolling()
    with pytest.raises(BudgetTooSmall) as refusal:
        stowplan.fit(model, (x,), budget=1, allow=("recompute",), moves=30)
    budget = int(refusal.value.minimum_bytes * (1 + share))
    expected = model(x)
    (gradient,) = torch.autograd.grad(expected, model.weight)
    fitted = stowplan.fit(model, (x,), budget=budget, allow=("recompute",), moves=30)
    found = fitted(x)
    assert torch.equal(found, expected)
    assert torch.equal(torch.autograd.grad(found, fitted.weight)[0], gradient)


class Transposed(nn.Module):
    """The gradient of smooth_l1_loss lies by rows whatever its operands do, and autograd copies it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(6, 6), nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(x).transpose(-1, -2) * self.scale
        return F.smooth_l1_loss(output, torch.zeros_like(output))


def test_a_backward_kernel_with_a_layout_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_LEARNED", {})
    monkeypatch.setattr(layouts, "_seen", set())
    x, model = torch.randn(2, 8, 6, 6), Transposed()
    fitted = stowplan.fit(model, (x,), budget="1GiB", allow=("recompute",), moves=30)
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    found = torch.autograd.grad(fitted(x), list(fitted.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
