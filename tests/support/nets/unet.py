"""U-Net for segmentation as first published: valid convolutions, cropped skips, two dropouts."""

import operator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.nets.net import Example, Net, Supervised

_BORDER = 184  # how much smaller than the image the prediction is: 572 -> 388


class DoubleConvolution(nn.Sequential):
    """Two valid 3x3 convolutions, each followed by ReLU: the image loses two pixels on every side."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.Conv2d(inputs, outputs, 3), nn.ReLU(), nn.Conv2d(outputs, outputs, 3), nn.ReLU())


class UNet(nn.Module):
    """Four levels down, a bottleneck, four levels up. The topmost up-convolution keeps its channels."""

    def __init__(self, channels: int, classes: int, width: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(5)]
        self.down = nn.ModuleList(map(DoubleConvolution, [channels, *widths[:3]], widths[:4]))
        self.bottleneck = DoubleConvolution(widths[3], widths[4])
        risen = [*widths[3:0:-1], widths[1]]
        self.rise = nn.ModuleList(
            nn.Sequential(nn.ConvTranspose2d(below, above, 2, stride=2), nn.ReLU())
            for below, above in zip(widths[:0:-1], risen, strict=True)
        )
        joined = map(operator.add, widths[3::-1], risen)
        self.up = nn.ModuleList(map(DoubleConvolution, joined, widths[3::-1]))
        self.dropout = nn.Dropout(0.5)
        self.score = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level, block in enumerate(self.down):
            x = block(x)
            if level == 3:
                x = self.dropout(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.dropout(self.bottleneck(x))
        for rise, block in zip(self.rise, self.up, strict=True):
            x = rise(x)
            x = block(torch.cat([crop_center(skips.pop(), x), x], dim=1))
        score: Tensor = self.score(x)
        return score


def crop_center(x: Tensor, like: Tensor) -> Tensor:
    """The middle of `x`, as high and wide as `like`."""
    height, width = like.shape[-2:]
    top, left = (x.shape[-2] - height) // 2, (x.shape[-1] - width) // 2
    return x[..., top : top + height, left : left + width]


def make(*, batch: int, resolution: int, width: int) -> Example:
    """An image and a label per pixel of the smaller prediction; `resolution` is 12 more than 16 n."""
    labelled = resolution - _BORDER
    image = torch.randn(batch, 1, resolution, resolution)
    label = torch.randint(0, 2, (batch, labelled, labelled))
    return Example(Supervised(UNet(1, 2, width), F.cross_entropy), (image, label))


NET = Net(
    "unet",
    "U-Net, valid convolutions, crops and dropout",
    make,
    tiny={"batch": 1, "resolution": 188, "width": 4},
    real={"batch": 1, "resolution": 572, "width": 64},
)
