"""Two training steps to try: `stowplan demo`, or `stowplan plan stowplan.demo:unet --budget 150MiB`.

Both are plain PyTorch. Each function returns a model and its arguments; `model(*args)` is the loss.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def unet() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A U-Net of three levels with BatchNorm: 4 images of 128x128, a class for each pixel."""
    torch.manual_seed(0)
    return UNet(width=16, classes=4), (torch.randn(4, 3, 128, 128), torch.randint(4, (4, 128, 128)))


def gpt() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A GPT of six layers with dropout: 8 sequences of 128 tokens, a vocabulary of 2,048."""
    torch.manual_seed(0)
    tokens = torch.randint(2048, (8, 129))
    return GPT(vocabulary=2048, context=128, width=192, heads=6, layers=6), (tokens[:, :-1], tokens[:, 1:])


class UNet(nn.Module):
    """The cross-entropy of the classes that are predicted for pixels."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.first, self.second, self.middle = (
            _two_convolutions(3, width),
            _two_convolutions(width, 2 * width),
            _two_convolutions(2 * width, 4 * width),
        )
        self.fourth = _two_convolutions(6 * width, 2 * width)
        self.last = _two_convolutions(3 * width, width)
        self.score = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        fine = self.first(images)
        coarse = self.second(F.max_pool2d(fine, 2))
        middle = self.middle(F.max_pool2d(coarse, 2))
        coarse = self.fourth(torch.cat([coarse, F.interpolate(middle, scale_factor=2.0)], 1))
        fine = self.last(torch.cat([fine, F.interpolate(coarse, scale_factor=2.0)], 1))
        return F.cross_entropy(self.score(fine), labels)


def _two_convolutions(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU()),
        *(nn.Conv2d(outer, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU()),
    )


class GPT(nn.Module):
    """The cross-entropy of the next token at every position."""

    def __init__(self, vocabulary: int, context: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        """The loss."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits = self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(places))))
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        by_head = self.attend(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = by_head.unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        fed: Tensor = self.feed(self.norm_2(x))
        return x + fed
