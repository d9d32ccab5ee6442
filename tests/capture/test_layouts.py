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
def test_a_write_into_a_part_goes_where_the_kernel_has_it(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "_LEARNED", {})
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
