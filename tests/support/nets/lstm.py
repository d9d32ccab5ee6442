"""An LSTM language model written out step by step, so that a trace sees plain ops."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.nets.language import token_example
from tests.support.nets.net import Example, Net


class LSTMLayer(nn.Module):
    """One layer: the inputs of all steps are projected at once, the state goes through them one by one."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.from_input = nn.Linear(inputs, 4 * hidden)
        self.from_state = nn.Linear(hidden, 4 * hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.from_input(x).transpose(0, 1)
        hidden = projected.new_zeros(len(x), self.from_state.in_features)
        cell = torch.zeros_like(hidden)
        states = []
        for gates in projected.unbind(0):
            hidden, cell = advance(gates + self.from_state(hidden), cell)
            states.append(hidden)
        return torch.stack(states, dim=1)


def advance(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """The hidden state and the cell after one step."""
    admit, forget, candidate, show = gates.chunk(4, dim=-1)
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(admit) * torch.tanh(candidate)
    return torch.sigmoid(show) * torch.tanh(cell), cell


class LSTMModel(nn.Module):
    """Embedding, stacked layers with dropout between them, a head over the vocabulary."""

    def __init__(self, vocabulary: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(LSTMLayer(hidden, hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary)
        self.dropout = dropout

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = F.dropout(layer(x), self.dropout, self.training)
        logits: Tensor = self.head(x)
        return logits


def make(*, batch: int, sequence: int, vocabulary: int, hidden: int, layers: int, dropout: float) -> Example:
    """Tokens and their successors."""
    return token_example(LSTMModel(vocabulary, hidden, layers, dropout), batch, sequence, vocabulary)


NET = Net(
    "lstm",
    "LSTM language model, unrolled",
    make,
    tiny={"batch": 2, "sequence": 6, "vocabulary": 101, "hidden": 16, "layers": 2, "dropout": 0.2},
    real={"batch": 16, "sequence": 64, "vocabulary": 10000, "hidden": 512, "layers": 2, "dropout": 0.2},
)
