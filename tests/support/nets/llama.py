"""Llama: RMSNorm, rotary positions, grouped-query attention and a SwiGLU feed-forward network."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.nets.language import initialise_normal, token_example
from tests.support.nets.net import Example, Net


def rotation(length: int, dim: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angle in every pair of dims: [length, dim] each."""
    frequency = base ** (-torch.arange(0, dim, 2) / dim)
    angle = torch.outer(torch.arange(length), frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` turned by its position's angle; the two halves of the last dim are the two coordinates."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class GroupedQueryAttention(nn.Module):
    """Causal attention in which several query heads share one head of keys and values."""

    def __init__(self, dim: int, heads: int, groups: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, groups * self.head_dim, bias=False)
        self.value = nn.Linear(dim, groups * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query = rotate(self._by_head(self.query(x)), cos, sin)
        key, value = rotate(self._by_head(self.key(x)), cos, sin), self._by_head(self.value(x))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(x.shape))
        return y

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class SwiGLU(nn.Module):
    """A feed-forward network whose hidden units are gated by SiLU of another projection."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class LlamaBlock(nn.Module):
    """Attention, then SwiGLU, each on the normalised residual stream."""

    def __init__(self, dim: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_feed_forward = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.attention = GroupedQueryAttention(dim, heads, groups)
        self.feed_forward = SwiGLU(dim, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x), cos, sin)
        y: Tensor = self.feed_forward(self.norm_feed_forward(x))
        return x + y


class Llama(nn.Module):
    """Logits of the next token at every position; angles are computed once for all blocks."""

    def __init__(
        self, vocabulary: int, context: int, dim: int, layers: int, heads: int, groups: int, hidden: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(LlamaBlock(dim, heads, groups, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        cos, sin = rotation(context, dim // heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.cos: Tensor
        self.sin: Tensor
        initialise_normal(self)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def make(
    *,
    batch: int,
    sequence: int,
    vocabulary: int,
    dim: int,
    layers: int,
    heads: int,
    groups: int,
    hidden: int,
) -> Example:
    """Tokens and their successors."""
    network = Llama(vocabulary, sequence, dim, layers, heads, groups, hidden)
    return token_example(network, batch, sequence, vocabulary)


NET = Net(
    "llama",
    "Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU",
    make,
    tiny={
        "batch": 2,
        "sequence": 16,
        "vocabulary": 101,
        "dim": 32,
        "layers": 2,
        "heads": 4,
        "groups": 2,
        "hidden": 88,
    },
    real={
        "batch": 2,
        "sequence": 512,
        "vocabulary": 32000,
        "dim": 768,
        "layers": 12,
        "heads": 12,
        "groups": 4,
        "hidden": 2048,
    },
)
