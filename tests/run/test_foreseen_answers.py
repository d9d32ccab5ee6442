"""What forward reads of small arguments and buffers is asked again at each call."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stowplan
from stowplan.errors import CaptureError

X = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))
CAUSAL = nn.Transformer.generate_square_subsequent_mask(6)
OTHER = CAUSAL.clone().index_fill_(1, torch.tensor([1]), float("-inf")).fill_diagonal_(0.0)


class Encoder(nn.Module):
    """An encoder as tutorials write it; the mask is an argument, or made in forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.net = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        made: Tensor = self.net(x, mask=mask)
        return made.square().mean()


class EncoderWithBuffer(Encoder):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", CAUSAL.clone())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        del mask
        made: Tensor = self.net(x, mask=self.mask)
        return made.square().mean()


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.net = nn.TransformerDecoder(layer, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        made: Tensor = self.net(x, x.flip(1), tgt_mask=mask)
        return made.square().mean()


class Codebook(nn.Module):
    """Initialises itself from its first batch, as vector quantisation does."""

    initted: Tensor
    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.register_buffer("initted", torch.tensor(False))
        self.register_buffer("codes", torch.zeros(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if not self.initted:
            self.codes.copy_(h.detach().mean(0))
            self.initted.fill_(True)
        loss: Tensor = (h - self.codes).square().mean()
        return loss


class Sized(Codebook):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)[:, : int(self.initted) + 1]
        return made.square().mean()


def outcome(model: Any, args: Sequence[Any]) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss = model(*args)
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients, *(buffer.clone() for buffer in model.buffers())]


def plans_after(model: nn.Module, calls: Sequence[Sequence[Any]]) -> int:
    """The number of plans after these calls, each of which equals eager's."""
    fitted = stowplan.fit(copy.deepcopy(model), tuple(calls[0]), budget="1GiB", moves=1, allow=("recompute",))
    for args in calls:
        assert all(map(torch.equal, outcome(model, args), outcome(fitted, args)))
    return len(stowplan.plans_of(fitted))


@pytest.mark.parametrize("kind", [Encoder, Decoder])
def test_a_float_mask_may_be_causal_or_not(kind: type[nn.Module]) -> None:
    assert plans_after(kind(), [(X, CAUSAL), (X, CAUSAL.clone()), (X, OTHER), (X, CAUSAL)]) == 2


def test_a_mask_that_forward_makes_needs_no_guard() -> None:
    assert plans_after(Encoder(), [(X,), (X + 1,), (X,)]) == 1


def test_a_mask_in_a_buffer_is_asked_at_each_call() -> None:
    model: Any = EncoderWithBuffer()
    fitted: Any = stowplan.fit(copy.deepcopy(model), (X,), budget="1GiB", moves=1, allow=("recompute",))
    for mask in (CAUSAL, OTHER, CAUSAL):
        for each in (model, fitted):
            each.mask.copy_(mask)
        assert all(map(torch.equal, outcome(model, (X,)), outcome(fitted, (X,))))
    assert len(stowplan.plans_of(fitted)) == 2


def test_a_flag_in_a_buffer_is_asked_at_each_call() -> None:
    assert plans_after(Codebook(), [(X,), (X + 1,), (X + 2,)]) == 2
    assert plans_after(Sized(), [(X,), (X + 1,), (X,)]) == 1


class Queue(nn.Module):
    """A queue with a pointer in a buffer, as MoCo keeps it."""

    pointer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x[:, int(self.pointer) :])
        self.pointer[0] = self.pointer[0] + 1
        return h.square().mean()


class Scaled(Queue):
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x) * x.mean().item()
        return h.square().mean()


def test_a_number_that_changes_at_each_call_is_refused_by_fit() -> None:
    with pytest.raises(CaptureError, match="of the buffer 'pointer', which it changes"):
        stowplan.fit(Queue(), (X,), budget="1GiB", moves=1)
    with pytest.raises(CaptureError, match="reads the values of a tensor"):
        stowplan.fit(Scaled(), (X,), budget="1GiB", moves=1)
