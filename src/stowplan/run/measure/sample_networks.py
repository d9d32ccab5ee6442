"""Eight small networks that a device is checked with, each a sequence of blocks from one tensor to one.

The loss is the mean of squares of the result. `size` multiplies widths: 1 takes a blink on a CPU, 8 is worth
measuring on a card.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stowplan.run.target import Target


def mean_of_squares(result: object) -> Tensor:
    """The loss of every sample network."""
    assert isinstance(result, Tensor)
    return result.float().square().mean()


class Attention(nn.Module):
    """Causal attention; `groups` heads of keys and values are shared."""

    def __init__(self, dim: int, heads: int, groups: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.groups, self.features, self.dropout = heads, groups, dim // heads, dropout
        self.query, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.pair = nn.Linear(dim, 2 * groups * self.features)

    def forward(self, rows: Tensor) -> Tensor:
        batch, count, _ = rows.shape
        query = self.query(rows).view(batch, count, self.heads, -1).transpose(1, 2)
        key, value = self.pair(rows).view(batch, count, 2, self.groups, -1).permute(2, 0, 3, 1, 4)
        shared = self.heads != self.groups
        made = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout, is_causal=True, enable_gqa=shared
        )
        result: Tensor = self.out(made.transpose(1, 2).flatten(2))
        return result


class Residual(nn.Module):
    """A block added to its input."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, rows: Tensor) -> Tensor:
        added: Tensor = self.blocks(rows)
        return rows + added


class UNetLevel(nn.Module):
    """A level of a U-Net: down, the levels below, up, beside a skip."""

    def __init__(self, width: int, below: nn.Module, dims: int) -> None:
        super().__init__()
        convolution, back = (nn.Conv2d, nn.ConvTranspose2d) if dims == 2 else (nn.Conv3d, nn.ConvTranspose3d)
        self.down, self.below = convolution(width, 2 * width, 2, stride=2), below
        self.up = back(2 * width, width, 2, stride=2)
        self.join = convolution(2 * width, width, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        made = torch.cat([image, self.up(self.below(self.down(image)))], 1)
        result: Tensor = self.join(made)
        return result


def _decoder(dim: int, *, groups: int, dropout: float, norm: Callable[[int], nn.Module]) -> list[nn.Module]:
    def feed_forward() -> list[nn.Module]:
        return [nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout)]

    return [
        block
        for _ in range(4)
        for block in (
            Residual(norm(dim), Attention(dim, 4, groups, dropout)),
            Residual(norm(dim), *feed_forward()),
        )
    ]


def _target(blocks: list[nn.Module], *shape: int) -> Target:
    return Target(nn.Sequential(*blocks), (torch.randn(shape),), loss=mean_of_squares)


def perceptron(size: int) -> Target:
    """Linear layers."""
    width = 64 * size
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(6)]
    return _target(list(blocks), 512, width)


def gpt(size: int) -> Target:
    """Attention with dropout and layer norm."""
    dim = 32 * size
    return _target(_decoder(dim, groups=4, dropout=0.1, norm=nn.LayerNorm), 4, 16 * size, dim)


def llama(size: int) -> Target:
    """Attention whose heads share keys and values, and RMS norm."""
    dim = 32 * size
    return _target(_decoder(dim, groups=2, dropout=0.0, norm=nn.RMSNorm), 4, 16 * size, dim)


def _convolutions(width: int, norm: Callable[[], nn.Module], *, dims: int = 2) -> list[nn.Module]:
    convolution = nn.Conv2d if dims == 2 else nn.Conv3d
    return [nn.Sequential(convolution(width, width, 3, padding=1), norm(), nn.ReLU()) for _ in range(4)]


def convolutional(size: int) -> Target:
    """Convolutions with batch norm."""
    width = 8 * size
    return _target(_convolutions(width, lambda: nn.BatchNorm2d(width)), 4, width, 32, 32)


def residual(size: int) -> Target:
    """Residual convolutions with group norm."""
    width = 8 * size
    return _target(
        [Residual(*_convolutions(width, lambda: nn.GroupNorm(2, width))) for _ in range(2)], 4, width, 32, 32
    )


def unet(size: int) -> Target:
    """A U-Net of two levels."""
    width = 4 * size
    middle = nn.Sequential(*_convolutions(4 * width, nn.Identity))
    return _target([UNetLevel(width, UNetLevel(2 * width, middle, 2), 2), nn.ReLU()], 2, width, 64, 64)


def unet3d(size: int) -> Target:
    """A U-Net of volumes with instance norm."""
    width = 2 * size
    middle = nn.Sequential(*_convolutions(2 * width, lambda: nn.InstanceNorm3d(2 * width), dims=3))
    return _target([UNetLevel(width, middle, 3), nn.ReLU()], 1, width, 16, 16, 16)


def separable(size: int) -> Target:
    """Depthwise and pointwise convolutions."""
    width = 8 * size
    blocks = [
        nn.Sequential(
            nn.Conv2d(width, width, 5, padding=2, groups=width), nn.Conv2d(width, width, 1), nn.SiLU()
        )
        for _ in range(4)
    ]
    return _target(list(blocks), 4, width, 32, 32)


NETWORKS: Mapping[str, Callable[[int], Target]] = {
    made.__name__: made for made in (perceptron, gpt, llama, convolutional, residual, unet, unet3d, separable)
}
