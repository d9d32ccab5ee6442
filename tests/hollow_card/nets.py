"""Small nets whose steps use what differs on CUDA: fused attention, cuDNN, dropout, fused norms."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Made = tuple[nn.Module, tuple[Tensor, ...]]


class Block(nn.Module):
    """A layer of a transformer, as in GPT-2."""

    def __init__(self, width: int, heads: int, drop: float) -> None:
        super().__init__()
        self.heads, self.drop = heads, drop
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, rows: Tensor) -> Tensor:
        batch, length, width = rows.shape
        shape = batch, length, 3, self.heads, width // self.heads
        query, key, value = self.attend(self.before(rows)).view(shape).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=self.drop)
        rows = rows + F.dropout(self.project(seen.transpose(1, 2).reshape(batch, length, width)), self.drop)
        return rows + F.dropout(self.narrow(F.gelu(self.widen(self.after(rows)))), self.drop)


class Transformer(nn.Module):
    """A small GPT, which returns its loss."""

    def __init__(self, layers: int = 2, width: int = 64, heads: int = 4, drop: float = 0.1, words: int = 200):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(64, width)
        self.layers = nn.ModuleList(Block(width, heads, drop) for _ in range(layers))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, words: Tensor, wanted: Tensor) -> Tensor:
        rows = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for layer in self.layers:
            rows = layer(rows)
        loss: Tensor = F.cross_entropy(self.head(self.last(rows)).flatten(0, 1), wanted.flatten())
        return loss


class Grouped(nn.Module):
    """Attention whose heads share keys, and RMS norms, as in Llama."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.query = nn.RMSNorm(width), nn.Linear(width, width, bias=False)
        self.shared = nn.Linear(width, width, bias=False)  # keys and values of half as many heads
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        batch, length, width = rows.shape
        normed, features = self.norm(rows), width // self.heads
        query = self.query(normed).view(batch, length, self.heads, features).transpose(1, 2)
        key, value = (
            self.shared(normed).view(batch, length, 2, self.heads // 2, features).permute(2, 0, 3, 1, 4)
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        rows = rows + seen.transpose(1, 2).reshape(batch, length, width)
        made: Tensor = self.down(F.silu(self.gate(rows)) * self.up(rows))
        return rows + made


class Loss(nn.Module):
    """Layers and the mean square of what they return."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, rows: Tensor) -> Tensor:
        made: Tensor = self.layers(rows)
        return made.float().square().mean()


def transformer(drop: float = 0.1) -> Made:
    words = torch.randint(0, 200, (4, 64))
    return Transformer(drop=drop), (words, words)


def narrow_transformer() -> Made:
    """In bfloat16: flash attention from compute capability 8.0 on."""
    model, args = transformer()
    return model.bfloat16(), args


def grouped() -> Made:
    return Loss(*(Grouped() for _ in range(2))), (torch.randn(4, 64, 64),)


def perceptron() -> Made:
    layers = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1))]
    return Loss(*layers), (torch.randn(256, 128),)


def convolutions() -> Made:
    """cuDNN's convolutions and batch norms, and pooling."""
    layers = [
        layer
        for channels in (3, 16, 16)
        for layer in (nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
    ]
    return Loss(*layers, nn.MaxPool2d(2), nn.Conv2d(16, 4, 1)), (torch.randn(4, 3, 32, 32),)


def norms() -> Made:
    """An embedding, group norm and layer norms of several shapes."""
    layers = (nn.Linear(64, 128), nn.LayerNorm(128), nn.SiLU(), nn.Linear(128, 64), nn.RMSNorm(64), nn.Tanh())
    return Loss(*layers, *layers), (torch.randn(4, 64, 64),)


NETS: dict[str, Callable[[], Made]] = {
    made.__name__: made
    for made in (transformer, narrow_transformer, grouped, perceptron, convolutions, norms)
}
