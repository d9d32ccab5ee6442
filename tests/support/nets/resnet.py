"""ResNet with bottleneck blocks, v1.5: the 3x3 convolution carries the stride."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.nets.net import Example, Net, Supervised


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution without bias that keeps the size up to its stride, and BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up to four times the width, around a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.reduce = convolution(inputs, width, 1)
        self.spatial = convolution(width, width, 3, stride)
        self.expand = convolution(width, 4 * width, 1)
        same = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if same else convolution(inputs, 4 * width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.reduce(x), inplace=True)
        y = F.relu(self.spatial(y), inplace=True)
        return F.relu(self.expand(y) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """A stem, four stages of bottlenecks that halve the image from the second on, and a linear head."""

    def __init__(self, layers: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)
        )
        blocks, inputs = [], width
        for stage, count in enumerate(layers):
            for index in range(count):
                blocks.append(
                    Bottleneck(inputs, width * 2**stage, stride=2 if stage > 0 and index == 0 else 1)
                )
                inputs = 4 * width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1)
        logits: Tensor = self.head(torch.flatten(x, 1))
        return logits


def make(*, batch: int, resolution: int, layers: tuple[int, ...], width: int, classes: int) -> Example:
    """Images and their classes."""
    images, labels = torch.randn(batch, 3, resolution, resolution), torch.randint(0, classes, (batch,))
    return Example(Supervised(ResNet(layers, width, classes), F.cross_entropy), (images, labels))


NET = Net(
    "resnet50",
    "ResNet-50 v1.5 with train-mode BatchNorm",
    make,
    tiny={"batch": 2, "resolution": 64, "layers": (1, 2, 1, 1), "width": 8, "classes": 10},
    real={"batch": 8, "resolution": 128, "layers": (3, 4, 6, 3), "width": 64, "classes": 1000},
)
