"""Forward that seeds PyTorch's generator or sets its state: every call does, or `fit` refuses by name."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stowplan
from stowplan import Search
from stowplan.capture import capture
from stowplan.errors import BudgetTooSmall, CaptureError


class Net(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.dice, self.own_forward = nn.Linear(4, 3), torch.Generator(), forward
        self.state = torch.get_rng_state()

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


def nothing_drawn(_: Any, h: Tensor) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        h = h * 2
    torch.set_rng_state(torch.get_rng_state())
    return F.dropout(h, 0.5)


def taken_twice(_: Any, h: Tensor) -> Any:
    """Two states after as many draws from one state, which are of other sizes."""
    start = torch.get_rng_state()
    h = F.dropout(h, 0.5)
    after = torch.get_rng_state()
    torch.set_rng_state(start)
    h = h * torch.rand(3)
    again = torch.get_rng_state()
    torch.set_rng_state(after.clone())
    h = h * torch.rand(3)
    torch.set_rng_state(again)
    return h * torch.rand(3)


PLANNED = [seeded, seeded_at_the_end, forked, forked_alone, rewound, nothing_drawn, taken_twice]


def known_state(net: Any, h: Tensor) -> Any:
    torch.set_rng_state(net.state)
    return F.dropout(h, 0.5)


def steered(_: Any, h: Tensor) -> Any:
    torch.manual_seed(1)
    return h * 2 if torch.rand(()) < 0.5 else h


REFUSED: dict[Callable[..., Any], str] = {
    seeded_anew: "with a number that is another one at each call",
    by_its_seed: "reads the seed of PyTorch's generator",
    known_state: "to a state that it was given",
    steered: "and branches on numbers that it draws",
    made_in_forward: "draws from a generator of its own",
    held: "draws from a generator of its own",
}


def fitted(net: nn.Module, x: Tensor, budget: int | str = "1MiB") -> Any:
    return stowplan.fit(net, (x,), budget=budget, search=Search(moves=3))


@pytest.mark.parametrize("forward", REFUSED, ids=lambda forward: forward.__name__)
def test_what_a_call_could_not_repeat_is_refused_by_name(forward: Callable[..., Any]) -> None:
    net = Net(forward)
    before = net.dice.get_state()
    with pytest.raises(CaptureError, match=REFUSED[forward]) as refusal:
        fitted(net, torch.randn(5, 4))
    assert refusal.value.where
    assert torch.equal(before, net.dice.get_state())


def trained(run: Any, x: Tensor) -> list[Any]:
    """Three steps from one seed: losses, gradients, and where the generator is then."""
    found: list[Any] = []
    torch.manual_seed(3)
    for _ in range(3):
        run.zero_grad()
        loss = run(x)
        loss.backward()
        found += [loss, run.lin.weight.grad.clone(), torch.get_rng_state()]
    return found


@pytest.mark.parametrize("budget", ["1MiB", "least"])
@pytest.mark.parametrize("forward", PLANNED, ids=lambda forward: forward.__name__)
def test_the_generator_is_moved_by_every_call_as_in_eager(forward: Callable[..., Any], budget: str) -> None:
    net, x = Net(forward), torch.randn(50, 4)
    if budget == "least":
        with pytest.raises(BudgetTooSmall) as refusal:
            fitted(net, x, budget=1)
        budget = str(refusal.value.minimum_bytes)
    planned = fitted(net, x, budget=budget)
    assert all(map(torch.equal, trained(Net(forward), x), trained(planned, x)))
    assert len(stowplan.plans_of(planned)) == 1


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
