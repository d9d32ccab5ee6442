"""What forward reads of small arguments and buffers is asked again at each call."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stowplan
from stowplan import Search
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
    fitted = stowplan.fit(
        copy.deepcopy(model), tuple(calls[0]), budget="1GiB", search=Search(moves=1), allow=("recompute",)
    )
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
    fitted: Any = stowplan.fit(
        copy.deepcopy(model), (X,), budget="1GiB", search=Search(moves=1), allow=("recompute",)
    )
    for mask in (CAUSAL, OTHER, CAUSAL):
        for each in (model, fitted):
            each.mask.copy_(mask)
        assert all(map(torch.equal, outcome(model, (X,)), outcome(fitted, (X,))))
    assert len(stowplan.plans_of(fitted)) == 2


def test_a_flag_in_a_buffer_is_asked_at_each_call() -> None:
    assert plans_after(Codebook(), [(X,), (X + 1,), (X + 2,)]) == 2
    assert plans_after(Sized(), [(X,), (X + 1,), (X,)]) == 1


class Counting(nn.Module):
    """Reads a number of a buffer, and changes it."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x) * int(self.calls)
        self.calls[0] = self.calls[0] + 1
        return h.square().mean()


class Growing(Counting):
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x[:, : int(self.calls) + 1])
        self.calls += 1
        return h.square().mean()


class Other(Counting):
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        if int(self.calls) == 2:
            h = h.tanh()
        self.calls += 1
        return h.square().mean()


class Scaled(Counting):
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x) * x.mean().item()
        return h.square().mean()


class MoCo(nn.Module):
    """The published queue of keys, with its pointer."""

    queue: Tensor
    queue_ptr: Tensor

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.size = size
        layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.ReLU())]
        self.encoder_q = nn.Sequential(*layers, nn.Linear(16, 8))
        self.encoder_k = copy.deepcopy(self.encoder_q).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(8, size), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self) -> None:
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data = k.data * 0.9 + q.data * (1.0 - 0.9)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys: Tensor) -> None:
        batch_size = keys.shape[0]
        ptr = int(self.queue_ptr)
        assert self.size % batch_size == 0
        self.queue[:, ptr : ptr + batch_size] = keys.T
        ptr = (ptr + batch_size) % self.size
        self.queue_ptr[0] = ptr

    def forward(self, im_q: Tensor, im_k: Tensor) -> tuple[Tensor, Tensor]:
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            k = F.normalize(self.encoder_k(im_k), dim=1)
        l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([l_pos, l_neg], dim=1) / 0.07
        self._dequeue_and_enqueue(k)
        return logits, torch.zeros(logits.shape[0], dtype=torch.long)


def loss_of(output: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(*output)


def trained(model: Any, eager: bool, steps: int) -> list[Tensor]:
    """What these steps leave, with another batch in each."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    told = []
    torch.manual_seed(2)
    for _ in range(steps):
        output = model(torch.randn(8, 16), torch.randn(8, 16))
        loss = loss_of(output) if eager else output
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        told += [loss.detach(), *(held.clone() for held in (*model.parameters(), *model.buffers()))]
    return told


def moco(budget: int | str) -> Any:
    call = torch.randn(8, 16), torch.randn(8, 16)
    return stowplan.fit(
        MoCo(), call, budget=budget, loss=loss_of, search=Search(moves=1), allow=("recompute",)
    )


def test_mocos_queue_runs_as_it_is_where_the_budget_has_room(caplog: pytest.LogCaptureFixture) -> None:
    fitted = moco("1GiB")
    assert all(map(torch.equal, trained(MoCo(), True, 6), trained(fitted, False, 6)))
    assert len(stowplan.plans_of(fitted)) == 1
    assert sum("the buffer 'queue_ptr', which it changes" in text for text in caplog.messages) == 1
    assert any("run MoCo as it is" in text for text in caplog.messages)


def test_mocos_queue_has_a_plan_for_each_pointer_in_a_small_budget(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(stowplan.BudgetTooSmall) as refusal:
        moco("1KiB")
    fitted = moco(refusal.value.minimum_bytes)
    assert all(map(torch.equal, trained(MoCo(), True, 6), trained(fitted, False, 6)))
    assert len(stowplan.plans_of(fitted)) == 4
    assert any("each number needs a plan of its own" in text for text in caplog.messages)


@pytest.mark.parametrize(("kind", "plans"), [(Counting, 1), (Growing, 4), (Other, 2)])
def test_a_counter_may_make_another_program(kind: type[nn.Module], plans: int) -> None:
    """A call that makes something larger, or runs other ops, is not run as it is but planned."""
    assert plans_after(kind(), [(X,)] * 4) == plans


def test_other_values_are_refused_by_fit() -> None:
    with pytest.raises(CaptureError, match="reads the values of a tensor"):
        stowplan.fit(Scaled(), (X,), budget="1GiB", search=Search(moves=1))
