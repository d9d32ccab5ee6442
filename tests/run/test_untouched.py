"""Planning leaves everything of the user's as it was; the comparison that says so sees what it has to see."""

import random
import warnings
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stowplan
from stowplan import Search
from tests.support.untouched import untouched


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.config = SimpleNamespace(sizes=[1, 2])

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.lin(x) - self.mean).square().mean()
        return loss


FAULTS: dict[str, Callable[[Any], object]] = {
    "a weight": lambda of: of.net.lin.weight.data.add_(1),
    "a weight and back": lambda of: of.net.lin.weight.detach().add_(1).sub_(1),
    "a buffer": lambda of: of.net.mean.fill_(torch.nan),
    "a storage of the same contents": lambda of: setattr(of.net.mean, "data", of.net.mean.clone()),
    "a size": lambda of: of.net.mean.resize_(2),
    "another tensor": lambda of: setattr(of.net, "mean", of.net.mean.clone()),
    "requires_grad": lambda of: of.net.lin.bias.requires_grad_(False),
    "a gradient": lambda of: setattr(of.net.lin.bias, "grad", torch.zeros(3)),
    "a hook on a tensor": lambda of: of.net.lin.bias.register_hook(lambda g: g),
    "a hook on a module": lambda of: of.net.lin.register_forward_hook(lambda *_: None),
    "a mode": lambda of: of.net.lin.eval(),
    "an attribute": lambda of: setattr(of.net.lin, "seen", 1),
    "a list in a config": lambda of: of.net.config.sizes.append(3),
    "an argument": lambda of: of.batch["x"].mul_(2),
    "a key of an argument": lambda of: of.batch.update(h=1),
    "an argument's requires_grad": lambda of: of.batch["x"].requires_grad_(),
    "the learning rate": lambda of: of.optimizer.param_groups[0].update(lr=1.0),
    "the optimizer's state": lambda of: of.optimizer.state[of.net.lin.bias]["momentum_buffer"].add_(1),
    "PyTorch's generator": lambda _: torch.rand(()),
    "Python's generator": lambda _: random.random(),
    "a filter of warnings": lambda _: warnings.filterwarnings("ignore", "nothing like this"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("fails", [False, True])
def test_the_comparison_sees_a_change(fault: str, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threading.active_count", lambda: 1)  # some are left by libraries of other tests
    net, batch = Net(), {"x": torch.randn(5, 4)}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(batch["x"]).backward()
    optimizer.step()
    optimizer.zero_grad()

    @untouched(net, (batch,), {}, optimizer)
    def planning() -> None:
        FAULTS[fault](SimpleNamespace(net=net, batch=batch, optimizer=optimizer))
        if fails:
            raise RuntimeError("as a refusal would")

    with pytest.raises(AssertionError, match="planning changed"):
        planning()


def test_the_comparison_passes_what_stays_the_same() -> None:
    net, batch = Net(), {"x": torch.randn(5, 4)}
    with untouched(net, (batch,), {}, torch.optim.Adam(net.parameters())):
        net(batch["x"])
    assert stowplan.fit(net, (batch["x"],), budget="1MiB", search=Search(moves=3)) is not net


def test_a_refusal_leaves_nothing_that_disturbs_the_next_fit() -> None:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.relu = nn.Linear(4, 3), torch.jit.script(nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = self.relu(self.lin(x)).square().mean()
            return loss

    x = torch.randn(5, 4)
    with suppress(Exception):  # a scripted module cannot be planned
        stowplan.fit(Scripted(), (x,), budget="1MiB", search=Search(moves=3))
    stowplan.fit(Net(), (x,), budget="1MiB", search=Search(moves=3))
