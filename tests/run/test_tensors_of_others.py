"""Tensors outside the model that require a gradient: read without gradients, or refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import stowplan
from stowplan import Search
from stowplan.errors import CaptureError
from tests.support.equality import equal

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
Loss = Callable[[nn.Module, Tensor], Tensor]


class Student(nn.Module):
    """A network whose loss, a function, may read tensors that are not in the network."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.loss = nn.Linear(8, 8), nn.Linear(8, 8), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(nn.Sequential(self.a, nn.Tanh(), self.b), x)


def distilled(net: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = TEACHER(x)
    loss: Tensor = (net(x) - target).square().mean()
    return loss


def detached(net: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (net(x) * TEACHER.weight.detach()[0] - TEACHER(x).detach()).square().mean()
    return loss


torch.manual_seed(1)
TEACHER = nn.Linear(8, 8)


def trained(model: nn.Module, teacher: nn.Linear) -> list[Tensor]:
    """Losses and parameters of three iterations, after each of which the teacher moves."""
    seen, optimizer = list[Tensor](), torch.optim.SGD(model.parameters(), 0.1)
    for number in range(3):
        optimizer.zero_grad()
        loss = model(X + number)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            teacher.weight.mul_(0.9)
        seen += [loss.detach().clone(), *(p.detach().clone() for p in model.parameters())]
    return seen


@pytest.mark.parametrize("loss", [distilled, detached])
@pytest.mark.parametrize("stale", [False, True])
def test_what_is_read_without_gradients_may_require_one(
    loss: Loss, stale: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for is_planned in (False, True):
        teacher = copy.deepcopy(TEACHER)
        monkeypatch.setitem(globals(), "TEACHER", teacher)
        if stale:
            teacher(X).sum().backward()
        before = teacher.weight.grad
        model: Any = Student(loss)
        if is_planned:
            model = stowplan.fit(model, (X,), budget="1MiB", search=Search(moves=10))
        seen.append(trained(model, teacher))
        assert teacher.weight.grad is before
        monkeypatch.undo()
    assert equal(*seen)


class Carrying(Student):
    """Reads the state of the call before without its history."""

    state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x) if self.state is None else self.a(x) + self.b(self.state.detach())
        self.state = torch.tanh(h)
        return self.state.square().mean() + h.mean()


def test_a_state_may_carry_a_history_that_nothing_reads() -> None:
    model = Carrying(distilled)
    planned = stowplan.fit(copy.deepcopy(model), (X,), budget="1MiB", search=Search(moves=10))
    teacher = copy.deepcopy(TEACHER)
    assert equal(trained(model, teacher), trained(planned, teacher))
    assert len(stowplan.plans_of(planned)) == 2


class Product(torch.autograd.Function):
    """Runs without gradients, and has one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


def differentiated(net: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (net(x) * TEACHER.bias).square().mean()
    return loss


def after_its_values(net: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (net(x) * TEACHER.bias.detach() * TEACHER.bias).square().mean()
    return loss


def by_a_function(net: nn.Module, x: Tensor) -> Tensor:
    product: Any = Product
    found: Tensor = product.apply(net(x), TEACHER.bias)
    return found.square().mean()


@pytest.mark.parametrize("loss", [differentiated, after_its_values, by_a_function])
def test_what_would_get_a_gradient_is_refused(loss: Loss) -> None:
    words = r"test_tensors_of_others.py:\d+: a tensor of shape \(8,\) requires a gradient but is no .*no_grad"
    with pytest.raises(CaptureError, match=words):
        stowplan.fit(Student(loss), (X,), budget="1MiB", search=Search(moves=10))


class Returning(Student):
    """Returns a tensor that is none of its own."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.a(x).square().mean(), TEACHER.bias


def test_what_is_only_returned_is_refused() -> None:
    with pytest.raises(CaptureError, match="requires a gradient but is no parameter or input"):
        stowplan.fit(Returning(distilled), (X,), budget="1MiB", search=Search(moves=10), outputs="all")
