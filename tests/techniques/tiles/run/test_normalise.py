"""Normalising a part by known statistics reads these alone, however they lie in memory."""

import pytest
import torch
from torch import Tensor

from stowplan.run.parts.normalise import normalised

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]
EPS = 1e-5


def beside_nan(numbers: Tensor) -> Tensor:
    """The same numbers with NaN in the memory right behind them, which nobody may read."""
    room = torch.full((numbers.numel() + 64,), torch.nan, dtype=numbers.dtype)
    return room[: numbers.numel()].copy_(numbers.flatten()).view(numbers.shape)


def spelled_out(part: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    groups = (*mean.shape, -1, *part.shape[2:])
    first, second = (s.view(*s.shape, *(1 for _ in groups[2:])) for s in (mean, variance))
    scaled = ((part.reshape(groups) - first) / torch.sqrt(second + EPS)).reshape(part.shape)
    along = (-1, *(1 for _ in part.shape[2:]))
    return scaled * weight.view(along) + bias.view(along)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 8, 1, 1), (1, 8, 2, 3), (2, 8, 1, 1)])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_part_is_normalised_by_the_statistics_of_its_own_groups(
    dtype: torch.dtype, shape: tuple[int, ...], groups: int
) -> None:
    torch.manual_seed(3)
    mean, variance = torch.randn(shape[0], groups, dtype=dtype), torch.rand(shape[0], groups, dtype=dtype) + 1
    vectors = [torch.rand(8, dtype=dtype), torch.rand(8, dtype=dtype)]
    given = [torch.randn(shape, dtype=dtype), mean, variance, *vectors]
    seed = torch.randn(shape, dtype=dtype)
    leaves = [beside_nan(tensor).requires_grad_() for tensor in given]
    expected = [tensor.clone().requires_grad_() for tensor in given]
    part, mean, variance, weight, bias = leaves
    made, right = normalised(part, mean, variance, weight, bias, EPS), spelled_out(*expected)
    torch.testing.assert_close(made, right)
    found = torch.autograd.grad(made, leaves, seed)
    torch.testing.assert_close(found, torch.autograd.grad(right, expected, seed), rtol=1e-4, atol=1e-5)
