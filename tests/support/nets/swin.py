"""Swin transformer: attention inside windows that shift by half in every second block."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.nets.net import Example, Net, Supervised
from tests.support.nets.transformer import FeedForward


def to_windows(x: Tensor, side: int) -> Tensor:
    """[B, H, W, C] cut into windows: [B * windows, side * side, C]."""
    batch, height, width, channels = x.shape
    grid = x.view(batch, height // side, side, width // side, side, channels)
    return grid.permute(0, 1, 3, 2, 4, 5).reshape(-1, side * side, channels)


def from_windows(windows: Tensor, height: int, width: int, side: int) -> Tensor:
    """The inverse of `to_windows`."""
    grid = windows.view(-1, height // side, width // side, side, side, windows.shape[-1])
    return grid.permute(0, 1, 3, 2, 4, 5).reshape(-1, height, width, windows.shape[-1])


def pair_indices(side: int) -> Tensor:
    """For every pair of places in a window, the row of the bias table of their offset."""
    place = torch.arange(side)
    row, column = place.repeat_interleave(side), place.repeat(side)
    down = row[:, None] - row[None, :] + side - 1
    right = column[:, None] - column[None, :] + side - 1
    return down * (2 * side - 1) + right


def seam_mask(resolution: int, side: int, shift: int) -> Tensor:
    """Minus infinity between places that only the cyclic shift brought into one window: [windows, n, n]."""
    place = torch.arange(resolution)
    band = (place >= resolution - side).int() + (place >= resolution - shift).int()
    region = (3 * band[:, None] + band[None, :]).view(1, resolution, resolution, 1)
    windows = to_windows(region, side)
    apart = windows != windows.transpose(1, 2)
    return torch.zeros(apart.shape).masked_fill(apart, float("-inf"))


class WindowAttention(nn.Module):
    """Multi-head attention inside windows, with a learned bias per head and offset."""

    def __init__(self, dim: int, heads: int, resolution: int, side: int, shift: int) -> None:
        super().__init__()
        self.heads, self.side, self.shift = heads, side, shift
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.offset_bias = nn.Parameter(torch.empty((2 * side - 1) ** 2, heads))
        nn.init.trunc_normal_(self.offset_bias, std=0.02)
        self.register_buffer("pairs", pair_indices(side), persistent=False)
        self.register_buffer("seams", seam_mask(resolution, side, shift) if shift else None, persistent=False)
        self.pairs: Tensor
        self.seams: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, dim = x.shape
        windows = to_windows(
            torch.roll(x, (-self.shift, -self.shift), (1, 2)) if self.shift else x, self.side
        )
        qkv = self.qkv(windows).view(*windows.shape[:2], 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=self._bias(batch))
        mixed = self.out(mixed.transpose(1, 2).reshape(windows.shape))
        y = from_windows(mixed, height, width, self.side)
        return torch.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y

    def _bias(self, batch: int) -> Tensor:
        """Per window, head and pair of places: [1 or B * windows, heads, n, n]."""
        bias = self.offset_bias[self.pairs].permute(2, 0, 1)
        if self.seams is None:
            return bias[None]
        return (bias[None] + self.seams[:, None]).repeat(batch, 1, 1, 1)


class SwinBlock(nn.Module):
    """Window attention, then a feed-forward network, each on the normalised residual stream."""

    def __init__(self, dim: int, heads: int, resolution: int, window: int, *, shifted: bool) -> None:
        super().__init__()
        side = min(window, resolution)
        shift = side // 2 if shifted and resolution > window else 0
        self.norm_attention, self.norm_feed_forward = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = WindowAttention(dim, heads, resolution, side, shift)
        self.feed_forward = FeedForward(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        y: Tensor = self.feed_forward(self.norm_feed_forward(x))
        return x + y


class PatchMerging(nn.Module):
    """Every 2x2 places become one of twice the channels."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim)
        self.reduce = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        corners = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        merged: Tensor = self.reduce(self.norm(torch.cat(corners, dim=-1)))
        return merged


class Swin(nn.Module):
    """Patches, stages of window blocks with merging between them, the mean of all places to a head."""

    def __init__(
        self, resolution: int, patch: int, dim: int, layers: tuple[int, ...], window: int, classes: int
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, stride=patch)
        self.norm_patches = nn.LayerNorm(dim)
        blocks: list[nn.Module] = []
        side = resolution // patch
        for stage, count in enumerate(layers):
            if stage > 0:
                blocks.append(PatchMerging(dim))
                dim, side = 2 * dim, side // 2
            heads = dim // 32
            blocks += [SwinBlock(dim, heads, side, window, shifted=i % 2 == 1) for i in range(count)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.blocks(self.norm_patches(self.patches(image).permute(0, 2, 3, 1)))
        logits: Tensor = self.head(self.norm(x).mean((1, 2)))
        return logits


def make(
    *,
    batch: int,
    resolution: int,
    patch: int,
    dim: int,
    layers: tuple[int, ...],
    window: int,
    classes: int,
) -> Example:
    """Images and their classes."""
    network = Swin(resolution, patch, dim, layers, window, classes)
    images, labels = torch.randn(batch, 3, resolution, resolution), torch.randint(0, classes, (batch,))
    return Example(Supervised(network, F.cross_entropy), (images, labels))


NET = Net(
    "swin",
    "Swin-T: shifted windows with relative position bias",
    make,
    tiny={
        "batch": 2,
        "resolution": 32,
        "patch": 4,
        "dim": 32,
        "layers": (2, 1),
        "window": 4,
        "classes": 10,
    },
    real={
        "batch": 4,
        "resolution": 224,
        "patch": 4,
        "dim": 96,
        "layers": (2, 2, 6, 2),
        "window": 7,
        "classes": 1000,
    },
)
