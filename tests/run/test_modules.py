"""Modules of PyTorch that take their own ways through autograd train as in eager, to the bit."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from tests.support.models import images
from tests.support.side_by_side import differences

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]


class Then(nn.Module):
    """A module and what is done to its result."""

    def __init__(self, module: nn.Module, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.then = module, then

    def forward(self, *args: Tensor) -> Tensor:
        result = self.module(*args)
        first: Tensor = result[0] if isinstance(result, tuple) else result
        return self.then(first).square().mean()


def as_is(x: Tensor) -> Tensor:
    return x


class Scaled(torch.autograd.Function):
    """A function of the user's own, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp() * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * cast(Tensor, x).cos()


own: Callable[[Tensor], Tensor] = Scaled.apply
LAYER = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
CASES: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
    "lstm": (Then(nn.LSTM(5, 6, num_layers=2, batch_first=True), as_is), (images(3, 4, 5),)),
    "gru": (Then(nn.GRU(5, 6, bidirectional=True), as_is), (images(4, 3, 5),)),
    "attention": (Then(nn.MultiheadAttention(8, 2, dropout=0.1), as_is), (images(5, 2, 8),) * 3),
    "encoder layer": (Then(LAYER, as_is), (images(2, 5, 8),)),
    "bilinear": (
        Then(nn.Conv2d(2, 3, 3), lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
        (images(1, 2, 6, 6),),
    ),
    "nearest": (Then(nn.Conv2d(2, 3, 3), lambda x: F.interpolate(x, scale_factor=3)), (images(1, 2, 6, 6),)),
    "group norm": (Then(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)), (images(2, 2, 6, 6),)),
    "instance norm": (
        Then(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True)),
        (images(2, 2, 6, 6),),
    ),
    "weight norm": (Then(weight_norm(nn.Linear(4, 5)), as_is), (images(3, 4),)),
    "spectral norm": (Then(spectral_norm(nn.Linear(4, 5)), as_is), (images(3, 4),)),
    "renormed embedding": (Then(nn.Embedding(7, 4, max_norm=0.5), as_is), (torch.tensor([1, 2, 1]),)),
    "channels last": (
        Then(nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last), F.silu),  # type: ignore[call-overload]  # stub
        (images(2, 4, 6, 6).to(memory_format=torch.channels_last),),
    ),
    "own function": (Then(nn.Linear(4, 4), own), (images(3, 4),)),
    "fourier": (Then(nn.Linear(4, 8), lambda x: torch.fft.rfft(x).abs()), (images(3, 4),)),
    "top k": (Then(nn.Linear(4, 8), lambda x: x.topk(3)[0] + x.sort()[0][:, :3]), (images(3, 4),)),
    "feature dropout": (Then(nn.Conv2d(2, 3, 3), nn.Dropout2d(0.3)), (images(2, 2, 6, 6),)),
    "alpha dropout": (Then(nn.Linear(4, 8), nn.AlphaDropout(0.3)), (images(3, 4),)),
    "random leak": (Then(nn.Linear(4, 8), nn.RReLU()), (images(3, 4),)),
    "cumulative": (Then(nn.Linear(4, 8), lambda x: x.cumsum(1) * x.sigmoid().cumprod(1)), (images(3, 4),)),
    "one-dimensional pools": (
        Then(nn.Conv1d(2, 3, 3), lambda x: F.adaptive_avg_pool1d(F.max_pool1d(x, 2), 2)),
        (images(2, 2, 9),),
    ),
    "unfolded": (Then(nn.Conv2d(2, 3, 3), lambda x: F.unfold(x, 2)), (images(2, 2, 6, 6),)),
    "shuffled": (Then(nn.Conv2d(2, 8, 1), nn.PixelShuffle(2)), (images(1, 2, 3, 3),)),
    "reflected": (Then(nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), as_is), (images(1, 2, 5, 5),)),
    "summed by einstein": (Then(nn.Linear(4, 4), lambda x: torch.einsum("ij,kj->ik", x, x)), (images(3, 4),)),
    "sampled grid": (
        Then(
            nn.Conv2d(2, 2, 1), lambda x: F.grid_sample(x, x.permute(0, 2, 3, 1).tanh(), align_corners=False)
        ),
        (images(1, 2, 4, 4),),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_trains_as_in_eager(name: str) -> None:
    model, args = CASES[name]
    assert differences(model, args) == []


def test_a_head_with_its_loss_in_one() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 50)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            loss: Tensor = F.linear_cross_entropy(self.body(x), self.head.weight, target)
            return loss

    assert differences(Head(), (images(9, 4), torch.arange(9))) == []


def test_double_precision_and_a_frozen_part() -> None:
    model = Then(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), as_is).double()
    for parameter in model.module[0].parameters():  # type: ignore[index]  # a Sequential
        parameter.requires_grad_(False)
    assert differences(model, (images(3, 4).double(),)) == []
