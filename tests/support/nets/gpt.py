"""GPT-2: learned positions, pre-norm blocks, and one matrix for the embedding and the head."""

import torch
from torch import Tensor, nn

from tests.support.nets.language import initialise_normal, token_example
from tests.support.nets.net import Example, Net
from tests.support.nets.transformer import Block, FeedForward, SelfAttention


class GPT(nn.Module):
    """Logits of the next token at every position."""

    def __init__(
        self, vocabulary: int, context: int, dim: int, layers: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(context, dim)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(
                Block(dim, SelfAttention(dim, heads, causal=True), FeedForward(dim, approximate="tanh"))
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        initialise_normal(self)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def make(
    *,
    batch: int,
    sequence: int,
    vocabulary: int,
    context: int,
    dim: int,
    layers: int,
    heads: int,
    dropout: float,
) -> Example:
    """Tokens and their successors."""
    network = GPT(vocabulary, max(context, sequence), dim, layers, heads, dropout)
    return token_example(network, batch, sequence, vocabulary)


NET = Net(
    "gpt",
    "GPT-2 small with tied embeddings",
    make,
    tiny={
        "batch": 2,
        "sequence": 16,
        "vocabulary": 101,
        "context": 32,
        "dim": 32,
        "layers": 2,
        "heads": 4,
        "dropout": 0.1,
    },
    real={
        "batch": 2,
        "sequence": 256,
        "vocabulary": 50257,
        "context": 1024,
        "dim": 768,
        "layers": 12,
        "heads": 12,
        "dropout": 0.0,
    },
)
