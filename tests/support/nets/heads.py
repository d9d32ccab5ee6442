"""Heads and losses over a vocabulary, as models write them: shifted, smoothed, weighted, tied, masked."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.nets.net import Example

WORDS = 11


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    """Logits of all positions but the last, with an ignored label and smoothing."""
    kept = logits[:, :-1].reshape(-1, WORDS)
    return F.cross_entropy(kept, labels[:, 1:].reshape(-1), ignore_index=3, label_smoothing=0.1)


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    """Classes before positions, a weight for each class, and a capped and masked head."""
    capped = 5 * torch.tanh(logits / 5)
    masked = capped.masked_fill(torch.arange(WORDS) == WORDS - 1, -torch.inf)
    weight = torch.linspace(0.5, 1.5, WORDS, dtype=logits.dtype)
    return F.cross_entropy(masked.transpose(1, 2), labels, weight=weight, reduction="sum")


def likelihoods(logits: Tensor, labels: Tensor) -> Tensor:
    """A distribution over words for each position, in place of one word."""
    wanted = F.one_hot(labels, WORDS).to(logits.dtype) * 0.9 + 0.1 / WORDS
    return (logits.softmax(-1) - wanted).square().mean() + F.cross_entropy(
        logits.flatten(0, 1), wanted.flatten(0, 1)
    )


HEADS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "shifted": shifted,
    "weighted": weighted,
    "likelihoods": likelihoods,
}


class Head(nn.Module):
    """An embedding with a padding word, and a head with a bias, which may have one weight."""

    def __init__(self, kind: str, *, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8, padding_idx=2)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(8, WORDS)
        self.kind = kind
        if tied:
            self.head.weight = self.words.weight

    def logits(self, words: Tensor) -> Tensor:
        """Scores of the next word."""
        found: Tensor = self.head(self.dropout(self.words(words)))
        return found

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        return HEADS[self.kind](self.logits(words), labels)


class Returned(Head):
    """The same, with the logits for the caller."""

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        logits = self.logits(words)
        return torch.cat([HEADS[self.kind](logits, labels).view(1), logits.flatten()])


def heads(kind: str, *, tied: bool, returned: bool = False, batch: int = 2) -> Example:
    """One of them in float64, with words and labels."""
    model = (Returned if returned else Head)(kind, tied=tied).double()
    words, labels = torch.randint(0, WORDS - 1, (2, batch, 5))
    return Example(model, (words, labels))
