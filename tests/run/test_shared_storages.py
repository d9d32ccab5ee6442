"""Tensors that share a storage, or lie in a larger one, train as in eager and count for what they hold."""

import copy

import pytest
import torch
from torch import Tensor, nn

from stowplan import Search
from stowplan.errors import CaptureError
from stowplan.run.fit import fit, plans_of
from tests.support.side_by_side import AMPLE, differences_at_both_ends, measured_peak, smallest_budget

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]


class Product(nn.Module):
    """Two arguments, used differently."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.1, 1, 8))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (a.tanh() * b.exp() * self.w).sigmoid().sum()


class Writing(nn.Module):
    """Writes into a part of its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.1, 1, 8))

    def forward(self, a: Tensor) -> Tensor:
        a[:, 1] = a[:, 0] * 2
        return (a.exp() * self.w).sum()


def test_a_tensor_given_twice_is_another_call_than_two_tensors() -> None:
    model, one, other = Product(), torch.randn(4, 8), torch.randn(4, 8)
    fitted = fit(model, (one, one), budget=AMPLE, allow=["recompute"], search=Search(moves=10))
    for args in ((one, one), (one, other), (other, other[:])):
        assert torch.equal(fitted(*args), model(*args))


@pytest.mark.slow
def test_a_parameter_given_as_an_argument_is_another_call() -> None:
    model, other = Product(), torch.randn(8)
    fitted = fit(model, (model.w, other), budget=AMPLE, allow=["recompute"], search=Search(moves=10))
    for args in ((model.w, other), (other, model.w), (other, other)):
        assert torch.equal(fitted(*args), model(*args))


def test_slices_of_one_storage() -> None:
    whole = torch.randn(8, 8)
    assert differences_at_both_ends(Product(), (whole[:4], whole[2:6])) == []
    assert differences_at_both_ends(Product(), (whole[4:], whole[:4])) == []


def test_parameters_in_one_storage() -> None:
    model, flat = Product(), torch.linspace(0.1, 1, 16)
    model.w = nn.Parameter(flat[:8])
    model.v = nn.Parameter(flat[8:])
    assert differences_at_both_ends(model, (torch.randn(4, 8), torch.randn(4, 8))) == []


def test_slices_count_what_they_read_and_once() -> None:
    whole = torch.randn(64, 8)
    model, args = Product(), (whole[2:6], whole[4:8])
    budget = smallest_budget(model, args)
    fitted = fit(copy.deepcopy(model), args, budget=budget, allow=["recompute"], search=Search(moves=100))
    (plan,) = plans_of(fitted)
    assert whole[2:8].nbytes < plan.projected_peak_bytes < whole.nbytes
    assert measured_peak(fitted, args) == plan.projected_peak_bytes <= budget


def test_the_next_slice_is_no_new_call() -> None:
    whole, other = torch.randn(64, 8), torch.randn(4, 8)
    fitted = fit(Product(), (whole[:4], other), budget=AMPLE, allow=["recompute"], search=Search(moves=10))
    for start in range(0, 60, 4):
        fitted(whole[start : start + 4], other)
    assert len(plans_of(fitted)) == 1


def test_writing_into_a_part_of_a_slice() -> None:
    model, whole = Writing(), torch.randn(8, 8)
    twin = whole.clone()
    fitted = fit(model, (whole[2:6],), budget=AMPLE, allow=["recompute"], search=Search(moves=10))
    assert torch.equal(whole, twin)
    for start in (2, 0, 4):
        planned, eager = fitted(whole[start : start + 4]), model(twin[start : start + 4])
        assert torch.equal(planned, eager)
        assert torch.equal(whole, twin)


def test_writing_into_a_part_of_a_tensor_with_gaps_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"writes into a part of a.*pass a.contiguous\(\)"):
        fit(Writing(), (torch.randn(4, 16)[:, ::2],), budget=AMPLE)


def test_writing_into_memory_that_two_arguments_share_is_refused() -> None:
    class Adding(Product):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return super().forward(a.add_(1), b)

    whole = torch.randn(8, 8)
    with pytest.raises(CaptureError, match=r"writes into a, which shares memory with b.*b.clone\(\)"):
        fit(Adding(), (whole[:4], whole[2:6]), budget=AMPLE)
