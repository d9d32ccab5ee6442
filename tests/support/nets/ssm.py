"""A selective state-space model in the manner of Mamba, its scan written out step by step."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.nets.language import token_example
from tests.support.nets.net import Example, Net


class SelectiveScan(nn.Module):
    """Per channel a diagonal linear system whose step size, input and output maps depend on the input."""

    def __init__(self, channels: int, states: int) -> None:
        super().__init__()
        rank = max(1, channels // 16)
        self.select = nn.Linear(channels, rank + 2 * states, bias=False)
        self.widen = nn.Linear(rank, channels)
        self.log_decay = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(channels, 1))
        self.direct = nn.Parameter(torch.ones(channels))
        self.parts = [rank, states, states]

    def forward(self, x: Tensor) -> Tensor:
        step, into, out = self.select(x).split(self.parts, dim=-1)
        step = F.softplus(self.widen(step))
        keep = torch.exp(-step[..., None] * self.log_decay.exp())
        driven = (step * x)[..., None] * into[:, :, None, :]
        state = torch.zeros_like(driven[:, 0])
        outputs = []
        for t in range(x.shape[1]):
            state = keep[:, t] * state + driven[:, t]
            outputs.append((state * out[:, t, None, :]).sum(-1))
        return torch.stack(outputs, dim=1) + self.direct * x


class StateSpaceBlock(nn.Module):
    """Norm, a gated pair of projections, a causal depthwise convolution and the scan, on a residual."""

    def __init__(self, dim: int, states: int, kernel: int = 4) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.project = nn.Linear(dim, 4 * dim, bias=False)
        self.mix = nn.Conv1d(2 * dim, 2 * dim, kernel, groups=2 * dim, padding=kernel - 1)
        self.scan = SelectiveScan(2 * dim, states)
        self.out = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.project(self.norm(x)).chunk(2, dim=-1)
        y = self.mix(y.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        z: Tensor = self.out(self.scan(F.silu(y)) * F.silu(gate))
        return x + z


class StateSpaceModel(nn.Module):
    """Embedding, blocks, norm, a head over the vocabulary."""

    def __init__(self, vocabulary: int, dim: int, layers: int, states: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.blocks = nn.Sequential(*(StateSpaceBlock(dim, states) for _ in range(layers)))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(tokens))))
        return logits


def make(*, batch: int, sequence: int, vocabulary: int, dim: int, layers: int, states: int) -> Example:
    """Tokens and their successors."""
    return token_example(StateSpaceModel(vocabulary, dim, layers, states), batch, sequence, vocabulary)


NET = Net(
    "ssm",
    "Selective state-space language model, unrolled",
    make,
    tiny={"batch": 2, "sequence": 6, "vocabulary": 101, "dim": 16, "layers": 2, "states": 4},
    real={"batch": 8, "sequence": 64, "vocabulary": 10000, "dim": 256, "layers": 4, "states": 16},
)
