"""What all language models of the set share: token examples and the loss over the vocabulary."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.nets.net import Example, Supervised


def next_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of every position's prediction."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def token_example(network: nn.Module, batch: int, sequence: int, vocabulary: int) -> Example:
    """Random tokens; the target of each is its successor."""
    tokens = torch.randint(0, vocabulary, (batch, sequence + 1))
    inputs, target = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return Example(Supervised(network, next_token_loss), (inputs, target))


def initialise_normal(network: nn.Module, std: float = 0.02) -> None:
    """Weights of linear layers and embeddings from a narrow normal distribution, biases zero."""
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
