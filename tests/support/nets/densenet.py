"""DenseNet: every layer reads the concatenation of all earlier ones of its block."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.nets.net import Example, Net, Supervised


class DenseLayer(nn.Sequential):
    """BatchNorm, ReLU, 1x1 convolution to four times the growth; again to 3x3 and the growth itself."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__(
            nn.BatchNorm2d(inputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(inputs, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )


class DenseBlock(nn.ModuleList):
    """Layers that each add `growth` channels to what all later ones see."""

    def __init__(self, inputs: int, layers: int, growth: int) -> None:
        super().__init__(DenseLayer(inputs + index * growth, growth) for index in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)


class Transition(nn.Sequential):
    """Halves the channels and the image between two blocks."""

    def __init__(self, inputs: int) -> None:
        super().__init__(
            nn.BatchNorm2d(inputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(inputs, inputs // 2, 1, bias=False),
            nn.AvgPool2d(2),
        )


class DenseNet(nn.Module):
    """A stem of twice the growth, dense blocks with transitions between them, a linear head."""

    def __init__(self, layers: tuple[int, ...], growth: int, classes: int) -> None:
        super().__init__()
        channels = 2 * growth
        blocks: list[nn.Module] = [
            nn.Conv2d(3, channels, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        ]
        for index, count in enumerate(layers):
            if index > 0:
                blocks.append(Transition(channels))
                channels //= 2
            blocks.append(DenseBlock(channels, count, growth))
            channels += count * growth
        blocks.append(nn.BatchNorm2d(channels))
        self.features = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(F.relu(self.features(x), inplace=True), 1)
        logits: Tensor = self.head(torch.flatten(x, 1))
        return logits


def make(*, batch: int, resolution: int, layers: tuple[int, ...], growth: int, classes: int) -> Example:
    """Images and their classes."""
    images, labels = torch.randn(batch, 3, resolution, resolution), torch.randint(0, classes, (batch,))
    return Example(Supervised(DenseNet(layers, growth, classes), F.cross_entropy), (images, labels))


NET = Net(
    "densenet121",
    "DenseNet-121: long-lived concatenations",
    make,
    tiny={"batch": 2, "resolution": 64, "layers": (2, 3, 2), "growth": 8, "classes": 10},
    real={"batch": 8, "resolution": 128, "layers": (6, 12, 24, 16), "growth": 32, "classes": 1000},
)
