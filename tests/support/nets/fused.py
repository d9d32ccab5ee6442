"""Attention and a gated network with several projections in one weight, taken apart by `split` and slices."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Fused(nn.Module):
    """A block of each kind: all heads in one weight, keys and values repeated for queries, a gate."""

    def __init__(self, dim: int = 16, heads: int = 4, groups: int = 2, hidden: int = 24) -> None:
        super().__init__()
        self.heads, self.groups, self.width = heads, groups, dim // heads
        self.norm, self.inner_norm, self.last_norm = (nn.LayerNorm(dim) for _ in range(3))
        self.all, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.query, self.pair = nn.Linear(dim, dim), nn.Linear(dim, 2 * groups * self.width)
        self.inner_out = nn.Linear(dim, dim)
        self.gate_and_up, self.down = nn.Linear(dim, 2 * hidden, bias=False), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._by_head(t) for t in self.all(self.norm(x)).split(x.shape[-1], dim=-1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        y = self.inner_norm(x)
        pair, half = self.pair(y), self.groups * self.width
        key, value = (self._repeated(self._by_head(t)) for t in (pair[..., :half], pair[..., half:]))
        mixed = F.scaled_dot_product_attention(self._by_head(self.query(y)), key, value)
        x = x + self.inner_out(mixed.transpose(1, 2).reshape(x.shape))
        gate, up = self.gate_and_up(self.last_norm(x)).chunk(2, dim=-1)
        last: Tensor = x + self.down(F.dropout(F.silu(gate) * up, 0.1))
        return last.square().mean()

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.width).transpose(1, 2)

    def _repeated(self, x: Tensor) -> Tensor:
        batch, groups, length, width = x.shape
        times = self.heads // groups
        return x[:, :, None].expand(batch, groups, times, length, width).reshape(batch, -1, length, width)


def fused() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """In float64, on a few vectors."""
    torch.manual_seed(0)
    return Fused().double(), (torch.randn(4, 6, 16, dtype=torch.float64),)
