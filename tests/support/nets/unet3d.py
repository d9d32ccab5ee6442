"""3-D U-Net for volumes in the style of nnU-Net: InstanceNorm, strided convolutions, Dice loss."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.nets.net import Example, Net, Supervised


class ConvolutionBlock(nn.Sequential):
    """Convolution, InstanceNorm, LeakyReLU, twice; the first convolution may halve the volume."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__(
            nn.Conv3d(inputs, outputs, 3, stride=stride, padding=1),
            nn.InstanceNorm3d(outputs, affine=True),
            nn.LeakyReLU(0.01),
            nn.Conv3d(outputs, outputs, 3, padding=1),
            nn.InstanceNorm3d(outputs, affine=True),
            nn.LeakyReLU(0.01),
        )


class UNet3d(nn.Module):
    """`levels` resolutions joined by skips, channels doubling up to ten times the first."""

    def __init__(self, channels: int, classes: int, width: int, levels: int) -> None:
        super().__init__()
        widths = [min(width * 2**level, width * 10) for level in range(levels)]
        self.stem = ConvolutionBlock(channels, widths[0])
        self.down = nn.ModuleList(ConvolutionBlock(a, b, 2) for a, b in pairwise(widths))
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.rise = nn.ModuleList(nn.ConvTranspose3d(a, b, 2, stride=2, bias=False) for a, b in pairs)
        self.up = nn.ModuleList(ConvolutionBlock(2 * b, b) for _, b in pairs)
        self.score = nn.Conv3d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.stem(x)]
        for block in self.down:
            skips.append(block(skips[-1]))
        x = skips.pop()
        for rise, block in zip(self.rise, self.up, strict=True):
            x = block(torch.cat([rise(x), skips.pop()], dim=1))
        score: Tensor = self.score(x)
        return score


def dice_and_cross_entropy(score: Tensor, label: Tensor) -> Tensor:
    """Cross-entropy minus the soft Dice overlap averaged over samples and classes."""
    space = tuple(range(2, score.ndim))
    share = score.softmax(1)
    truth = torch.zeros_like(score).scatter_(1, label[:, None], 1.0)
    overlap = (share * truth).sum(space)
    dice = (2 * overlap + 1) / (share.sum(space) + truth.sum(space) + 1)
    return F.cross_entropy(score, label) - dice.mean()


def make(*, batch: int, resolution: int, channels: int, classes: int, width: int, levels: int) -> Example:
    """A volume of several modalities and a label per voxel."""
    cube = (resolution,) * 3
    network = UNet3d(channels, classes, width, levels)
    volume, label = torch.randn(batch, channels, *cube), torch.randint(0, classes, (batch, *cube))
    return Example(Supervised(network, dice_and_cross_entropy), (volume, label))


NET = Net(
    "unet3d",
    "3-D U-Net with InstanceNorm and a Dice loss",
    make,
    tiny={"batch": 1, "resolution": 16, "channels": 2, "classes": 3, "width": 4, "levels": 3},
    real={"batch": 1, "resolution": 64, "channels": 4, "classes": 4, "width": 32, "levels": 5},
)
