"""Diffusion U-Net: GroupNorm residual blocks told the time step, attention where the image is small."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.nets.net import Example, Net, Supervised


def time_embedding(step: Tensor, dim: int) -> Tensor:
    """Sines and cosines of the time step at geometrically spaced frequencies: [B, dim]."""
    frequency = torch.exp(torch.arange(dim // 2, device=step.device) * (-math.log(10000.0) / (dim // 2)))
    angle = step[:, None] * frequency[None, :]
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


class ResidualBlock(nn.Module):
    """Two normalised convolutions; the time embedding shifts every channel between them."""

    def __init__(self, inputs: int, outputs: int, time: int, groups: int) -> None:
        super().__init__()
        self.norm_in, self.norm_out = nn.GroupNorm(groups, inputs), nn.GroupNorm(groups, outputs)
        self.convolution_in = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.convolution_out = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shift = nn.Linear(time, outputs)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.convolution_in(F.silu(self.norm_in(x)))
        y = y + self.shift(F.silu(time))[:, :, None, None]
        y = self.convolution_out(F.silu(self.norm_out(y)))
        residual: Tensor = y + self.shortcut(x)
        return residual


class SpatialAttention(nn.Module):
    """Attention of every pixel to every other, on a residual."""

    def __init__(self, channels: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(groups, channels)
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, 3, self.heads, channels // self.heads, height * width)
        query, key, value = qkv.transpose(-1, -2).unbind(1)
        mixed = F.scaled_dot_product_attention(query, key, value)
        y: Tensor = self.out(mixed.transpose(-1, -2).reshape(x.shape))
        return x + y


class DiffusionUNet(nn.Module):
    """Predicts the noise in an image at a time step. Attention at the coarsest level and in the middle."""

    def __init__(self, width: int, levels: int, heads: int, groups: int) -> None:
        super().__init__()
        widths = [width * 2 ** min(level, 2) for level in range(levels)]
        time, deepest = 4 * width, widths[-1]
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(
            ResidualBlock(a, b, time, groups) for a, b in zip([width, *widths], widths, strict=False)
        )
        self.shrink = nn.ModuleList(nn.Conv2d(b, b, 3, stride=2, padding=1) for b in widths[:-1])
        self.middle = ResidualBlock(deepest, deepest, time, groups)
        self.attention = nn.ModuleList(SpatialAttention(deepest, heads, groups) for _ in range(3))
        self.up = nn.ModuleList(
            ResidualBlock(a + b, b, time, groups)
            for a, b in zip([deepest, *widths[::-1]], widths[::-1], strict=False)
        )
        self.grow = nn.ModuleList(nn.Conv2d(b, b, 3, padding=1) for b in widths[:0:-1])
        self.norm = nn.GroupNorm(groups, width)
        self.out = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        time = self.time(time_embedding(step, self.width).to(x.dtype))
        x, skips = self._descend(self.stem(x), time)
        x = self.attention[1](self.middle(x, time))
        x = self._ascend(x, time, skips)
        noise: Tensor = self.out(F.silu(self.norm(x)))
        return noise

    def _descend(self, x: Tensor, time: Tensor) -> tuple[Tensor, list[Tensor]]:
        skips = []
        for block, shrink in zip(self.down, [*self.shrink, self.attention[0]], strict=True):
            x = block(x, time)
            skips.append(x)
            x = shrink(x)
        return x, skips

    def _ascend(self, x: Tensor, time: Tensor, skips: list[Tensor]) -> Tensor:
        for level, block in enumerate(self.up):
            x = block(torch.cat([x, skips.pop()], dim=1), time)
            if level == 0:
                x = self.attention[2](x)
            if skips:
                x = self.grow[level](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return x


def make(*, batch: int, resolution: int, width: int, levels: int, heads: int, groups: int) -> Example:
    """Noisy images, their time steps and the noise."""
    image = torch.randn(batch, 3, resolution, resolution)
    step, noise = torch.randint(0, 1000, (batch,)), torch.randn_like(image)
    network = DiffusionUNet(width, levels, heads, groups)
    return Example(Supervised(network, F.mse_loss), (image, step, noise))


NET = Net(
    "diffusion",
    "Diffusion U-Net with attention, GroupNorm and time embedding",
    make,
    tiny={"batch": 2, "resolution": 16, "width": 8, "levels": 3, "heads": 2, "groups": 4},
    real={"batch": 4, "resolution": 64, "width": 64, "levels": 4, "heads": 4, "groups": 32},
)
