"""A step that cannot be captured is refused with what happened, where, and what to try."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stowplan.capture import capture
from stowplan.errors import CaptureError
from tests.support.models import images

pytestmark = pytest.mark.torch


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)


class LooksAtValues(Base):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y.sum() if y.sum() > 0 else -y.sum()


class ShapeFromValues(Base):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y[y > 0].sum()


class TakesNumbers(Base):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y.sum() * y[0, 0].item()


class HidesAParameter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [torch.ones(4, requires_grad=True)]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x) * self.hidden[0]
        return y.sum()


class WritesAnAttribute(Base):
    def __init__(self) -> None:
        super().__init__()
        self.seen = [torch.zeros(4)]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        self.seen[0].copy_(y.detach().mean(0))
        return y.sum()


class Detached(Base):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x).detach()
        return y.sum()


class DrawsInBackward(Base):
    def forward(self, x: Tensor) -> Tensor:
        apply: Any = _Noisy.apply  # which is not typed
        y: Tensor = apply(self.fc(x))
        return y.sum()


class _Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        del ctx
        return gradient * torch.rand_like(gradient)


class ChoosesWhileItRuns(Base):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.cond(x.sum() > 0, self.fc, torch.neg, (x,))
        return y.sum()


class SparseGradient(Base):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x + self.table(torch.tensor([1, 2])))
        return y.sum()


class WritesThroughAnotherDtype(Base):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x) * 1j
        torch.view_as_real(y).mul_(2.0)
        return y.abs().sum()


@pytest.mark.parametrize(
    ("model", "what", "advice"),
    [
        (LooksAtValues, "reads the values", "torch.where"),
        (ShapeFromValues, "shape of a tensor depends on values", "mask"),
        (TakesNumbers, "reads the values", "remove .item()"),
        (HidesAParameter, r"shape \(4,\) requires a gradient", "register it as a parameter"),
        (WritesAnAttribute, "writes into a tensor", "register_buffer"),
        (Detached, "no output depends on a parameter", "requires_grad"),
        (DrawsInBackward, "random numbers during backward", "checkpoint"),
        (ChoosesWhileItRuns, "cond branches", "in Python"),
        (SparseGradient, "torch.sparse_coo", "sparse=False"),
        (WritesThroughAnotherDtype, "through a view of torch.float32", "a new tensor"),
    ],
)
@pytest.mark.slow
def test_the_refusal_says_what_where_and_what_to_try(model: type[Base], what: str, advice: str) -> None:
    with pytest.raises(CaptureError, match=what) as refusal:
        capture(model(), (images(2, 4),))
    assert advice in refusal.value.advice
    assert refusal.value.exit_code == 2


@pytest.mark.parametrize("model", [LooksAtValues, ShapeFromValues, TakesNumbers, WritesAnAttribute])
def test_the_users_line_is_named(model: type[Base]) -> None:
    with pytest.raises(CaptureError) as refusal:
        capture(model(), (images(2, 4),))
    assert refusal.value.where.partition(":")[0] == __file__
    line = int(refusal.value.where.rpartition(":")[2])
    assert model.forward.__code__.co_firstlineno < line


def test_an_error_of_the_model_itself_is_told() -> None:
    with pytest.raises(CaptureError, match="must have same reduction dim") as refusal:
        capture(nn.Linear(3, 3), (images(2, 4),))
    assert "eager" in refusal.value.advice


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_captured_as_what_they_compute(reentrant: bool) -> None:
    class Recomputing(Base):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(lambda x: self.fc(x).sin(), x, use_reentrant=reentrant)
            return y.sum()

    graph = capture(Recomputing(), (images(2, 4).requires_grad_(),)).graph
    assert sum(op.type == "aten.addmm.default" for op in graph.ops) == 1
