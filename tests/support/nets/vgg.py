"""VGG-16: plain 3x3 convolutions with ReLU and max-pooling, with its three linear layers or a global mean."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.nets.net import Example, Net, Supervised

_CONVOLUTIONS = (2, 2, 3, 3, 3)  # per stage; every stage ends in a pooling that halves the image


class VGG(nn.Module):
    """Sixteen layers; without the classifier, one linear layer on the features' mean takes any image."""

    def __init__(self, width: int, hidden: int, classes: int, *, has_classifier: bool) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        inputs = 3
        for stage, count in enumerate(_CONVOLUTIONS):
            outputs = width * 2 ** min(stage, 3)
            for _ in range(count):
                blocks += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
                inputs = outputs
            blocks.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*blocks)
        self.grid = 7 if has_classifier else 1
        self.head = classifier(inputs, hidden, classes) if has_classifier else nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.features(x), self.grid)
        logits: Tensor = self.head(torch.flatten(x, 1))
        return logits


def classifier(channels: int, hidden: int, classes: int) -> nn.Sequential:
    """The three linear layers over a 7x7 grid of features."""
    return nn.Sequential(
        nn.Linear(channels * 49, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(hidden, classes),
    )


def make(
    *, batch: int, resolution: int, width: int, hidden: int, classes: int, has_classifier: bool
) -> Example:
    """Images and their classes."""
    network = VGG(width, hidden, classes, has_classifier=has_classifier)
    images, labels = torch.randn(batch, 3, resolution, resolution), torch.randint(0, classes, (batch,))
    return Example(Supervised(network, F.cross_entropy), (images, labels))


NET = Net(
    "vgg16",
    "VGG-16, with its classifier or as features of any image",
    make,
    tiny={
        "batch": 2,
        "resolution": 64,
        "width": 4,
        "hidden": 32,
        "classes": 10,
        "has_classifier": True,
    },
    real={
        "batch": 4,
        "resolution": 224,
        "width": 64,
        "hidden": 4096,
        "classes": 1000,
        "has_classifier": True,
    },
)
