"""EfficientNet: inverted bottlenecks of depthwise convolutions with squeeze-and-excitation and SiLU."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.nets.net import Example, Net, Supervised


class Stage(NamedTuple):
    """A run of equal blocks; the stride applies to the first."""

    expand: int
    kernel: int
    stride: int
    channels: int
    blocks: int


B0 = (
    Stage(1, 3, 1, 16, 1),
    Stage(6, 3, 2, 24, 2),
    Stage(6, 5, 2, 40, 2),
    Stage(6, 3, 2, 80, 3),
    Stage(6, 5, 1, 112, 3),
    Stage(6, 5, 2, 192, 4),
    Stage(6, 3, 1, 320, 1),
)


class ConvolutionNorm(nn.Sequential):
    """A convolution that keeps the size up to its stride, then BatchNorm."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(outputs, eps=1e-3),
        )


class SqueezeExcitation(nn.Module):
    """Scales each channel by what a small network makes of all channels' means."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, squeezed, 1)
        self.excite = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        mean = F.adaptive_avg_pool2d(x, 1)
        return x * torch.sigmoid(self.excite(F.silu(self.squeeze(mean))))


class InvertedBottleneck(nn.Module):
    """Expand, depthwise convolution, squeeze-and-excitation, project; a shortcut where shapes agree."""

    def __init__(self, inputs: int, stage: Stage, stride: int) -> None:
        wide = inputs * stage.expand
        expand = [ConvolutionNorm(inputs, wide, 1), nn.SiLU(inplace=True)] if stage.expand > 1 else []
        super().__init__()
        self.body = nn.Sequential(
            *expand,
            ConvolutionNorm(wide, wide, stage.kernel, stride, groups=wide),
            nn.SiLU(inplace=True),
            SqueezeExcitation(wide, max(1, inputs // 4)),
            ConvolutionNorm(wide, stage.channels, 1),
        )
        self.has_shortcut = stride == 1 and inputs == stage.channels

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.has_shortcut else y


class EfficientNet(nn.Module):
    """A stem of `width` channels, the stages, a wide 1x1 convolution and a linear head."""

    def __init__(self, stages: tuple[Stage, ...], width: int, classes: int) -> None:
        super().__init__()
        blocks: list[nn.Module] = [ConvolutionNorm(3, width, 3, 2), nn.SiLU(inplace=True)]
        inputs = width
        for stage in stages:
            for index in range(stage.blocks):
                blocks.append(InvertedBottleneck(inputs, stage, stage.stride if index == 0 else 1))
                inputs = stage.channels
        blocks += [ConvolutionNorm(inputs, 4 * inputs, 1), nn.SiLU(inplace=True)]
        self.features = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(4 * inputs, classes))

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.features(x), 1)
        logits: Tensor = self.head(torch.flatten(x, 1))
        return logits


def make(*, batch: int, resolution: int, stages: tuple[Stage, ...], width: int, classes: int) -> Example:
    """Images and their classes."""
    images, labels = torch.randn(batch, 3, resolution, resolution), torch.randint(0, classes, (batch,))
    return Example(Supervised(EfficientNet(stages, width, classes), F.cross_entropy), (images, labels))


NET = Net(
    "efficientnet",
    "EfficientNet-B0: depthwise convolutions, squeeze-and-excitation, SiLU",
    make,
    tiny={
        "batch": 2,
        "resolution": 32,
        "stages": (Stage(1, 3, 1, 8, 1), Stage(4, 5, 2, 16, 2), Stage(4, 3, 2, 24, 1)),
        "width": 8,
        "classes": 10,
    },
    real={"batch": 8, "resolution": 128, "stages": B0, "width": 32, "classes": 1000},
)
