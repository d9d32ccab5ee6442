"""Ops and modules of real models: fitted equal to eager, or refused with advice."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import stowplan
from stowplan import Search
from stowplan.capture import capture
from stowplan.capture.program import draws
from stowplan.errors import CaptureError

aten = torch.ops.aten
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


class Experts(nn.Module):
    """A mixture of experts by one grouped product, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.weights = nn.Linear(8, 3), nn.Parameter(torch.randn(3, 8, 12) / 3)

    def forward(self, x: Tensor) -> Tensor:
        score, chosen = self.gate(x).softmax(-1).max(-1)
        order = chosen.argsort()
        ends = torch.histc(chosen.float(), 3, 0, 2).cumsum(0).to(torch.int32)
        made = F.grouped_mm(x[order], self.weights, offs=ends)
        loss: Tensor = (made * score[order, None]).square().mean()
        return loss


class Sequence(nn.Module):
    def __init__(self, kind: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.rnn = kind(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.rnn(x[:, None])[0].square().mean()
        return loss


class Mean(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.net(x).square().mean()
        return loss


class Spoken(nn.Module):
    """CTC of known lengths, which follow from the look of a tensor without values."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        frames = self.net(x.expand(3, 6, 8)).log_softmax(-1).transpose(0, 1)
        lengths = torch.ones_like(frames[..., 0], dtype=torch.long).sum(0)
        letters = torch.tensor([[1, 2], [3, 4], [2, 1]])
        return F.ctc_loss(frames, letters.flatten(), lengths, (letters >= 0).sum(1))


def scale_of(x: Tensor, factor: int) -> Tensor:
    return torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float) * factor)


def size_of(x: Tensor) -> Tensor:
    return torch.tensor(x.size(-1))


with warnings.catch_warnings(action="ignore"):  # newer versions of PyTorch advise against it
    scripted_scale, scripted_size = torch.jit.script(scale_of), torch.jit.script(size_of)


class Scripted(nn.Module):
    """TorchScript makes tensors of sizes, which no op is seen to make."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.net = self.net.to(x.dtype)
        h: Tensor = self.net(x) / scripted_scale(x, 2) * scripted_size(x)
        return h.square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "grouped_mm": Experts,
    "gru": lambda: Sequence(nn.GRU),
    "lstm": lambda: Sequence(nn.LSTM),
    "ctc": Spoken,
    "script": Scripted,
    "weight_norm": lambda: Mean(parametrizations.weight_norm(nn.Linear(8, 4))),
    "spectral_norm": lambda: Mean(parametrizations.spectral_norm(nn.Linear(8, 4))),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_it_is_fitted_equal_to_eager(name: str) -> None:
    if name == "grouped_mm" and not hasattr(F, "grouped_mm"):
        pytest.skip("this PyTorch has no grouped_mm")
    torch.manual_seed(0)
    eager = copy.deepcopy(MODELS[name]())
    fitted = stowplan.fit(
        copy.deepcopy(eager), (X,), budget=2**40, allow=["recompute"], search=Search(moves=5)
    )
    for x in (X, X.flip(0)):
        for model in (eager, fitted):
            model.zero_grad()
            model(x).backward()
        for (label, one), (_, other) in zip(eager.named_parameters(), fitted.named_parameters(), strict=True):
            assert one.grad is not None, label
            assert other.grad is not None, label
            assert torch.equal(one.grad, other.grad), label
        assert all(map(torch.equal, eager.buffers(), fitted.buffers()))


def test_attention_draws_for_dropout_alone() -> None:
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    assert not draws(forward, (X, X, X), {})
    assert draws(forward, (X, X, X, 0.1), {})
    assert not draws(backward, (*(X,) * 9, 0.1, (True,) * 4), {})
    assert draws(aten.bernoulli.p, (X, 0.5), {})


def test_the_workspace_of_an_lstm_of_onednn_is_counted() -> None:
    graph = capture(Sequence(nn.LSTM), (X,)).graph
    (layer,) = (op for op in graph.ops if op.type == "aten.mkldnn_rnn_layer.default")
    *results, workspace = (graph.tensors[name].nbytes or 0 for name in layer.writes())
    assert workspace > sum(results)


def _sparse(weight: Tensor) -> Tensor:
    return F.embedding(torch.arange(3), weight, sparse=True)


def _masked(weight: Tensor) -> Tensor:
    return weight[weight > 0]


def _positions(weight: Tensor) -> Tensor:
    return torch.nonzero(weight).float()[:2] @ weight[:2]


class Applied(nn.Module):
    def __init__(self, layer: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.randn(5, 8)), layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.weight).sum() + x.sum()


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (_sparse, "embeddings take sparse=False"),
        (_masked, "use torch.where or a mask instead of indexing by one"),
        (_positions, "use torch.where or a mask"),
    ],
)
def test_a_refusal_names_the_next_thing_to_try(layer: Callable[[Tensor], Tensor], words: str) -> None:
    with pytest.raises(CaptureError, match=rf"test_ops_of_models.py:\d+.*{words}"):
        stowplan.fit(Applied(layer), (X,), budget=2**40)
