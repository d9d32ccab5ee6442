"""A mixture of experts with fixed routing: each position has its expert, a gate scales the answer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.nets.language import initialise_normal, token_example
from tests.support.nets.net import Example, Net
from tests.support.nets.transformer import Block, FeedForward, SelfAttention


class FixedExperts(nn.Module):
    """Position p goes to expert p mod `experts`; all experts run as one batched product."""

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.gate = nn.Linear(dim, experts)
        self.up = nn.Parameter(torch.empty(experts, dim, hidden).normal_(std=0.02))
        self.down = nn.Parameter(torch.empty(experts, hidden, dim).normal_(std=0.02))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        order = torch.arange(length, device=x.device).view(-1, self.experts).t().flatten()
        routed = x[:, order].view(batch, self.experts, -1, dim).transpose(0, 1).flatten(1, 2)
        answers = torch.bmm(F.gelu(torch.bmm(routed, self.up)), self.down)
        answers = answers.view(self.experts, batch, -1, dim).transpose(0, 1).flatten(1, 2)
        home = torch.zeros_like(x).index_copy(1, order, answers)
        return home * self._gate_of_own_expert(x)

    def _gate_of_own_expert(self, x: Tensor) -> Tensor:
        """The share that the gate gives to the expert of each position: [B, L, 1]."""
        expert = torch.arange(x.shape[1], device=x.device) % self.experts
        shares: Tensor = self.gate(x).softmax(-1)
        return shares.gather(-1, expert.expand(x.shape[:2])[..., None])


class MoE(nn.Module):
    """A causal decoder in which every second block's feed-forward network is a set of experts."""

    def __init__(
        self, vocabulary: int, context: int, dim: int, layers: int, heads: int, experts: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Parameter(torch.empty(context, dim).normal_(std=0.02))
        self.blocks = nn.Sequential(
            *(
                Block(
                    dim,
                    SelfAttention(dim, heads, causal=True),
                    FixedExperts(dim, 4 * dim, experts) if index % 2 else FeedForward(dim),
                )
                for index in range(layers)
            )
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        initialise_normal(self)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def make(
    *, batch: int, sequence: int, vocabulary: int, dim: int, layers: int, heads: int, experts: int
) -> Example:
    """Tokens and their successors; `sequence` is a multiple of `experts`."""
    network = MoE(vocabulary, sequence, dim, layers, heads, experts)
    return token_example(network, batch, sequence, vocabulary)


NET = Net(
    "moe",
    "Decoder with a mixture of experts in every second block, fixed routing",
    make,
    tiny={
        "batch": 2,
        "sequence": 16,
        "vocabulary": 101,
        "dim": 32,
        "layers": 2,
        "heads": 4,
        "experts": 4,
    },
    real={
        "batch": 4,
        "sequence": 256,
        "vocabulary": 32000,
        "dim": 512,
        "layers": 8,
        "heads": 8,
        "experts": 8,
    },
)
