"""Forward that moves PyTorch's generator other than by drawing is refused by name; draws are eager's."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stowplan
from stowplan.capture import capture
from stowplan.errors import CaptureError


class Net(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.dice, self.own_forward = nn.Linear(4, 3), torch.Generator(), forward

    def forward(self, x: Tensor) -> Any:
        return self.own_forward(self, self.lin(x)).square().mean()


def seeded(_: Any, h: Tensor) -> Any:
    torch.manual_seed(42)  # as Reformer does before it hashes
    return F.dropout(h, 0.5)


def seeded_anew(_: Any, h: Tensor) -> Any:
    torch.seed()
    return F.dropout(h, 0.5)


def seeded_at_the_end(_: Any, h: Tensor) -> Any:
    torch.default_generator.manual_seed(1)
    return h


def forked(_: Any, h: Tensor) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        noise = torch.randn_like(h)
    return h * noise


def forked_alone(_: Any, h: Tensor) -> Any:
    with torch.random.fork_rng(devices=[]):
        noise = torch.randn_like(h)
    return h * noise * torch.rand(3)


def rewound(_: Any, h: Tensor) -> Any:
    state = torch.get_rng_state()
    first = F.dropout(h, 0.5)
    torch.set_rng_state(state)
    return first * F.dropout(h, 0.5)


def by_its_seed(_: Any, h: Tensor) -> Any:
    return h * torch.initial_seed()


def made_in_forward(_: Any, h: Tensor) -> Any:
    return h * torch.rand(3, generator=torch.Generator().manual_seed(3))


def held(net: Any, h: Tensor) -> Any:
    return h * torch.randn(3, generator=net.dice)


REFUSED: dict[Callable[..., Any], str] = {
    seeded: "seeds PyTorch's generator or sets its state",
    seeded_anew: "seeds PyTorch's generator or sets its state",
    seeded_at_the_end: "seeds PyTorch's generator or sets its state",
    forked: "seeds PyTorch's generator or sets its state",
    forked_alone: "seeds PyTorch's generator or sets its state",
    rewound: "seeds PyTorch's generator or sets its state",
    by_its_seed: "reads the seed of PyTorch's generator",
    made_in_forward: "draws from a generator of its own",
    held: "draws from a generator of its own",
}


def fitted(net: nn.Module, x: Tensor) -> Any:
    return stowplan.fit(net, (x,), budget="1MiB", moves=3, allow=("recompute",))


@pytest.mark.parametrize("forward", REFUSED, ids=lambda forward: forward.__name__)
def test_forward_that_moves_the_generator_is_refused_by_name(forward: Callable[..., Any]) -> None:
    net = Net(forward)
    before = net.dice.get_state()
    with pytest.raises(CaptureError, match=REFUSED[forward]) as refusal:
        fitted(net, torch.randn(5, 4))
    assert refusal.value.where
    assert torch.equal(before, net.dice.get_state())


def nothing_drawn(_: Any, h: Tensor) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        h = h * 2
    torch.set_rng_state(torch.get_rng_state())
    return F.dropout(h, 0.5)


def set_back_before_a_draw(_: Any, h: Tensor) -> Any:
    h, state = F.dropout(h, 0.5), torch.get_rng_state()
    torch.manual_seed(1)
    torch.set_rng_state(state.clone())
    return F.dropout(h, 0.5)


@pytest.mark.parametrize("forward", [nothing_drawn, set_back_before_a_draw])
def test_a_generator_that_is_put_back_before_anything_draws_is_planned(forward: Callable[..., Any]) -> None:
    eager, x = Net(forward), torch.randn(5, 4)
    planned = fitted(Net(forward), x)
    found = []
    for run in (eager, planned):
        torch.manual_seed(3)
        losses = [run(x) for _ in range(3)]
        for loss in losses:
            loss.backward()
        found.append([*losses, run.lin.weight.grad, torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_another_thread_draws_and_seeds_as_if_nothing_were_captured() -> None:
    """Forward waits for it: it does both while forward is captured."""
    drawn: list[Tensor] = []

    def beside() -> None:
        torch.manual_seed(5)
        drawn.append(torch.rand(3))

    def forward(_: Any, h: Tensor) -> Any:
        if not drawn:
            thread = threading.Thread(target=beside)
            thread.start()
            thread.join()
        return F.dropout(h, 0.5)

    net, x = Net(forward), torch.randn(5, 4)
    captured = capture(net, (x,))
    after = torch.rand(2)
    torch.manual_seed(5)
    assert torch.equal(drawn[0], torch.rand(3))
    assert torch.equal(after, torch.rand(2))
    assert any("bernoulli" in op.type for op in captured.graph.ops)
