"""T5: an encoder and a decoder with cross-attention, attention written out, positions as a learned bias."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.nets.language import next_token_loss
from tests.support.nets.net import Example, Net, Supervised

_BUCKETS, _FARTHEST = 32, 128


def offset_buckets(queries: int, keys: int, *, causal: bool) -> Tensor:
    """The bucket of each offset between query and key: exact when near, logarithmic when far."""
    offset = torch.arange(keys)[None, :] - torch.arange(queries)[:, None]
    buckets = _BUCKETS if causal else _BUCKETS // 2
    later = torch.zeros_like(offset) if causal else (offset > 0).long() * buckets
    distance = (-offset).clamp(min=0) if causal else offset.abs()
    exact = buckets // 2
    scale = (buckets - exact) / math.log(_FARTHEST / exact)
    far = exact + (torch.log(distance.clamp(min=1) / exact) * scale).long()
    return later + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))


class PositionBias(nn.Module):
    """A learned bias per head and bucket of offset, shared by all layers of a stack."""

    def __init__(self, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.table = nn.Embedding(_BUCKETS, heads)

    def forward(self, length: int) -> Tensor:
        with self.table.weight.device:
            buckets = offset_buckets(length, length, causal=self.causal)
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
        bias: Tensor = self.table(buckets).permute(2, 0, 1)[None]
        return bias.masked_fill(later, float("-inf")) if self.causal else bias


class Attention(nn.Module):
    """Multi-head attention from `x` to `memory`, unscaled as T5 has it."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        query, key, value = (self._by_head(y) for y in (self.query(x), self.key(memory), self.value(memory)))
        scores = query @ key.transpose(-1, -2)
        weights = self.dropout((scores if bias is None else scores + bias).softmax(-1))
        y: Tensor = self.out((weights @ value).transpose(1, 2).flatten(2))
        return y

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class Layer(nn.Module):
    """Self-attention, cross-attention in the decoder, a ReLU network, each on the normalised residual."""

    def __init__(self, dim: int, heads: int, hidden: int, dropout: float, *, crosses: bool) -> None:
        super().__init__()
        self.norm_self, self.attention = nn.RMSNorm(dim, eps=1e-6), Attention(dim, heads, dropout)
        if crosses:
            self.norm_cross, self.cross = nn.RMSNorm(dim, eps=1e-6), Attention(dim, heads, dropout)
        self.norm_feed_forward = nn.RMSNorm(dim, eps=1e-6)
        self.feed_forward = nn.Sequential(
            nn.Linear(dim, hidden, bias=False),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, dim, bias=False),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        y = self.norm_self(x)
        x = x + self.dropout(self.attention(y, y, bias))
        if memory is not None:
            x = x + self.dropout(self.cross(self.norm_cross(x), memory, None))
        z: Tensor = self.dropout(self.feed_forward(self.norm_feed_forward(x)))
        return x + z


class Stack(nn.Module):
    """The encoder (no memory) or the decoder (which reads the encoder's result)."""

    def __init__(
        self, dim: int, layers: int, heads: int, hidden: int, dropout: float, *, decodes: bool
    ) -> None:
        super().__init__()
        self.bias = PositionBias(heads, causal=decodes)
        self.layers = nn.ModuleList(
            Layer(dim, heads, hidden, dropout, crosses=decodes) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        bias = self.bias(x.shape[1])
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x, bias, memory)
        y: Tensor = self.dropout(self.norm(x))
        return y


class T5(nn.Module):
    """Logits of the target's tokens given the source; one embedding serves both stacks and the head."""

    def __init__(
        self, vocabulary: int, dim: int, layers: int, heads: int, hidden: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.encoder = Stack(dim, layers, heads, hidden, dropout, decodes=False)
        self.decoder = Stack(dim, layers, heads, hidden, dropout, decodes=True)
        self._initialise(dim)

    def _initialise(self, dim: int) -> None:
        """Narrow queries stand in for the missing scale of the attention scores."""
        for module in self.modules():
            if isinstance(module, Attention):
                nn.init.normal_(module.query.weight, std=(dim * module.head_dim) ** -0.5)
                for linear in (module.key, module.value, module.out):
                    nn.init.normal_(linear.weight, std=dim**-0.5)

    def forward(self, source: Tensor, shifted_target: Tensor) -> Tensor:
        memory = self.encoder(self.tokens(source))
        decoded = self.decoder(self.tokens(shifted_target), memory)
        scale = self.tokens.embedding_dim**-0.5
        return F.linear(decoded * scale, self.tokens.weight)


def make(
    *,
    batch: int,
    sequence: int,
    vocabulary: int,
    dim: int,
    layers: int,
    heads: int,
    hidden: int,
    dropout: float,
) -> Example:
    """Source tokens, the target shifted right by one, and the target (half as long as the source)."""
    network = T5(vocabulary, dim, layers, heads, hidden, dropout)
    source = torch.randint(0, vocabulary, (batch, sequence))
    target = torch.randint(0, vocabulary, (batch, sequence // 2))
    shifted = torch.cat([torch.zeros_like(target[:, :1]), target[:, :-1]], dim=1)
    return Example(Supervised(network, next_token_loss), (source, shifted, target))


NET = Net(
    "t5",
    "T5-small: encoder and decoder with relative position bias and cross-attention",
    make,
    tiny={
        "batch": 2,
        "sequence": 16,
        "vocabulary": 101,
        "dim": 32,
        "layers": 2,
        "heads": 4,
        "hidden": 64,
        "dropout": 0.1,
    },
    real={
        "batch": 4,
        "sequence": 256,
        "vocabulary": 32128,
        "dim": 512,
        "layers": 6,
        "heads": 8,
        "hidden": 2048,
        "dropout": 0.1,
    },
)
