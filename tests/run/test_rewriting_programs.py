"""Random programs that write into tensors and through views of them come out as in eager."""

from collections.abc import Callable
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor, nn

from tests.support.models import images
from tests.support.side_by_side import differences

pytestmark = [pytest.mark.slow, pytest.mark.torch]

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x[1:],
    "column": lambda x: x[:, 0],
    "strided": lambda x: x[::2],
    "transposed": lambda x: x.transpose(0, -1),
    "flat": lambda x: x.reshape(-1),
    "squeezed": lambda x: x.unsqueeze(0).squeeze(0),
    "diagonal": lambda x: x.diagonal(),
    "same": lambda x: x.view(x.shape),
}
WRITES: dict[str, Callable[[Tensor], object]] = {
    "mul_": lambda x: x.mul_(1.5),
    "add_": lambda x: x.add_(0.25),
    "relu_": lambda x: x.relu_(),
    "sigmoid_": lambda x: x.sigmoid_(),
    "zero_": lambda x: x.zero_(),
    "fill_": lambda x: x.fill_(0.5),
    "copy_": lambda x: x.copy_(x.detach().flip(0) * 0.5),
    "scaled copy": lambda x: x.copy_(torch.full_like(x, 0.1) * x.shape[0]),
    "masked": lambda x: x.masked_fill_(x > 0.3, 0.0),
    "bernoulli_": lambda x: x.bernoulli_(0.4),
}
PURE: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "clone": torch.clone,
    "double": lambda x: x * 2,
    "square": torch.square,
}
ACTIONS = {**VIEWS, **WRITES, **PURE}


@dataclass(frozen=True)
class Act:
    """Apply an action to one of the tensors made so far."""

    action: str
    operand: int


class Script(nn.Module):
    """Runs the acts on a projected input and sums up every tensor there is in the end."""

    def __init__(self, acts: list[Act]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.acts = acts

    def forward(self, x: Tensor) -> Tensor:
        tensors = [self.fc(x)]
        for act in self.acts:
            operand = tensors[act.operand % len(tensors)]
            made = ACTIONS[act.action](operand)
            if act.action not in WRITES:
                assert isinstance(made, Tensor)
                tensors.append(made)
        return torch.stack([tensor.tanh().sum() for tensor in tensors]).sum()


@settings(max_examples=60)
@given(st.lists(st.builds(Act, st.sampled_from(sorted(ACTIONS)), st.integers(0, 7)), min_size=1, max_size=8))
def test_scripts_of_views_and_writes(acts: list[Act]) -> None:
    model, x = Script(acts), images(4, 4)
    try:
        model(x).backward()
    except (RuntimeError, IndexError, ValueError):
        assume(False)  # not a program that eager can run
    assert differences(model, (x,), steps=1) == []
