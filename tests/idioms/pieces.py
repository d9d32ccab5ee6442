"""Networks and batches that many idioms share."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.idioms.side import Side

F: Any = nn.functional
"""Untyped, as in a script: its results have methods of PyTorch that carry no types."""


class Scores(nn.Module):
    """Scores of four classes, by a method."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 16), nn.Tanh()
        )
        self.head = nn.Linear(16, 4)

    def scores(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


class Classifier(Scores):
    """A model that returns its scores."""

    def forward(self, x: Tensor) -> Any:
        return self.scores(x)


class WithLoss(Scores):
    """A model that returns its loss."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.scores(x), y)


class Pictures(nn.Module):
    """A small convolutional net with batch norm that returns scores."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.two, self.head = nn.Conv2d(8, 8, 3, padding=1, stride=2), nn.Linear(8, 4)

    def features(self, x: Tensor) -> Any:
        return F.relu(self.two(F.relu(self.norm(self.one(x)))))

    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x).mean((2, 3)))


def batch(rows: int = 6) -> tuple[Tensor, Tensor]:
    """Features and labels."""
    return torch.randn(rows, 8), torch.randint(0, 4, (rows,))


def batches(times: int = 3, rows: int = 6) -> Iterator[tuple[Tensor, Tensor]]:
    """Several of them."""
    for _ in range(times):
        yield batch(rows)


def pictures(rows: int = 4, size: int = 8) -> tuple[Tensor, Tensor]:
    """Pictures and labels."""
    return torch.randn(rows, 3, size, size), torch.randint(0, 4, (rows,))


def tokens(rows: int = 2, length: int = 6, words: int = 20) -> Tensor:
    """Ids of words."""
    return torch.randint(0, words, (rows, length))


def train(
    side: Side,
    model: nn.Module,
    calls: Iterator[tuple[object, ...]],
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """The usual loop over a model that returns its loss."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    for args in calls:
        optimizer.zero_grad()
        loss = model(*args)
        loss.backward()
        optimizer.step()
        side.see("loss", loss)
