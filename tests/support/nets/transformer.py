"""The pre-norm transformer block that the ViT, GPT and mixture-of-experts nets share."""

import torch.nn.functional as F
from torch import Tensor, nn


class SelfAttention(nn.Module):
    """Multi-head attention of a sequence to itself; causal where a token may not see later ones."""

    def __init__(self, dim: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return y


class FeedForward(nn.Sequential):
    """Two linear layers, four times as wide between them, with GELU."""

    def __init__(self, dim: int, *, approximate: str = "none") -> None:
        super().__init__(nn.Linear(dim, 4 * dim), nn.GELU(approximate), nn.Linear(4 * dim, dim))


class Block(nn.Module):
    """Attention, then a feed-forward network, each on the normalised residual stream."""

    def __init__(self, dim: int, attention: nn.Module, feed_forward: nn.Module, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm_attention, self.attention = nn.LayerNorm(dim, eps), attention
        self.norm_feed_forward, self.feed_forward = nn.LayerNorm(dim, eps), feed_forward

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        y: Tensor = self.feed_forward(self.norm_feed_forward(x))
        return x + y
