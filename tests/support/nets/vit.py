"""Vision transformer: an image as a sequence of patches with a class token in front."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.nets.net import Example, Net, Supervised
from tests.support.nets.transformer import Block, FeedForward, SelfAttention


class ViT(nn.Module):
    """Patches by a strided convolution, learned positions, pre-norm blocks, a head on the class token."""

    def __init__(self, resolution: int, patch: int, dim: int, layers: int, heads: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.empty(1, (resolution // patch) ** 2 + 1, dim))
        nn.init.trunc_normal_(self.positions, std=0.02)
        self.blocks = nn.Sequential(
            *(
                Block(dim, SelfAttention(dim, heads, causal=False), FeedForward(dim), eps=1e-6)
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return logits


def make(
    *, batch: int, resolution: int, patch: int, dim: int, layers: int, heads: int, classes: int
) -> Example:
    """Images and their classes."""
    network = ViT(resolution, patch, dim, layers, heads, classes)
    images, labels = torch.randn(batch, 3, resolution, resolution), torch.randint(0, classes, (batch,))
    return Example(Supervised(network, F.cross_entropy), (images, labels))


NET = Net(
    "vit",
    "ViT-S/16",
    make,
    tiny={"batch": 2, "resolution": 32, "patch": 8, "dim": 32, "layers": 2, "heads": 4, "classes": 10},
    real={"batch": 8, "resolution": 224, "patch": 16, "dim": 384, "layers": 12, "heads": 6, "classes": 1000},
)
