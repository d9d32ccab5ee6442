"""Threads: several fit and train at once, beside others that draw, allocate and fork (THREADS=long: more)."""

import multiprocessing
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Barrier, Event, Thread
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import rand
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import stowplan
from stowplan import Search
from stowplan.errors import CaptureError

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]
PARTS, ROUNDS = (20, 10) if os.environ.get("THREADS") == "long" else (1, 3)  # rounds of each part


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 16))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.net(x)
        return made.square().mean()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.net(x.view(-1, 3, 16, 16))
        return made.abs().mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(16, 12, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.cells(x.view(4, -1, 16))[0]
        return made.square().sum()


class Masked(nn.Module):
    """Its mask has values, which are known while it is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(len(x)) % 3 != 0
        scores: Tensor = self.last(self.first(x).softmax(-1)[mask])
        return scores.square().mean()


KINDS: tuple[tuple[type[nn.Module], tuple[int, ...]], ...] = (
    (Perceptron, (16,)),
    (Convolutions, (3, 16, 16)),
    (Recurrent, (16,)),
    (Masked, (16,)),
)


def in_threads(works: list[Callable[[], Any]]) -> list[Any]:
    """The results of functions that threads begin at the same moment; an exception is raised here."""
    found: list[Any] = [None] * len(works)
    start = Barrier(len(works))

    def run(place: int) -> None:
        start.wait()
        try:
            found[place] = works[place]()
        except BaseException as fault:
            found[place] = fault

    threads = [Thread(target=run, args=(place,)) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outcome in found:
        if isinstance(outcome, BaseException):
            raise outcome
    return found


@contextmanager
def beside(*works: Callable[[], object]) -> Iterator[None]:
    """Threads that repeat some work meanwhile."""
    over = Event()

    def repeat(work: Callable[[], object]) -> None:
        while not over.wait(1e-4):
            work()

    threads = [Thread(target=repeat, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def draw() -> None:
    random.random()
    np.random.rand(3)
    torch.rand(3)


def allocate() -> Tensor:
    return torch.zeros(300_000) + 1


@dataclass(frozen=True)
class Training:
    """Three steps of one model: two of one shape, then one of another. Its numbers are those of `seed`."""

    kind: int
    seed: int

    def run(self, fitted: Callable[[nn.Module, Tensor], nn.Module]) -> list[Tensor]:
        """Losses and parameters."""
        kind, shape = KINDS[self.kind]
        numbers = np.random.default_rng(self.seed)
        model = kind()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.from_numpy(numbers.normal(size=parameter.shape)))
        sizes = (4 * (2 + self.seed % 50), 4 * (2 + self.seed % 50), 4 * (60 + self.seed % 7))
        given = [torch.from_numpy(numbers.normal(size=(size, *shape))).float() for size in sizes]
        model = fitted(model, given[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses = []
        for x in given:
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *(p.detach().clone() for p in model.parameters())]

    def planned(self) -> list[Tensor]:
        return self.run(
            lambda model, x: stowplan.fit(
                model, (x,), budget="1GiB", allow=("recompute",), search=Search(moves=100)
            )
        )

    def eager(self) -> list[Tensor]:
        return self.run(lambda model, _: model)


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_threads_that_fit_and_train_at_once_train_as_alone(part: int) -> None:
    with beside(draw, allocate):
        for number in range(part * ROUNDS, (part + 1) * ROUNDS):
            trainings = [Training(kind, seed=4 * number + kind) for kind in range(len(KINDS))]
            for found, training in zip(in_threads([t.planned for t in trainings]), trainings, strict=True):
                assert_same(found, training.eager())


def test_one_fitted_module_serves_several_threads() -> None:
    model = Perceptron()
    fitted = stowplan.fit(model, (torch.ones(8, 16),), budget="1MiB")
    given = [torch.randn(8 + 4 * (number // 2), 16) for number in range(6)]  # old shapes and new ones

    def gradients(x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(fitted(x), list(model.parameters()))

    found = in_threads([partial(gradients, x) for x in given])
    for x, own in zip(given, found, strict=True):
        assert_same(list(own), list(torch.autograd.grad(model(x), list(model.parameters()))))
    assert len(stowplan.plans_of(fitted)) <= 3


def test_draws_of_other_threads_are_not_those_of_forward() -> None:
    drawn: list[float] = []

    def note() -> None:
        draw()
        drawn.append(random.random())

    with beside(note):
        fitted = stowplan.fit(Perceptron(), (torch.ones(31, 16),), budget="1MiB")
        fitted(torch.ones(35, 16)).backward()
    assert len(drawn) == len(set(drawn))  # nobody's generator was put back


def of_python(x: Tensor) -> Tensor:
    return x * random.random()


def of_numpy(x: Tensor) -> Tensor:
    return x * float(np.random.uniform())


def by_another_name(x: Tensor) -> Tensor:
    return x * float(rand())


@pytest.mark.parametrize("draws", [of_python, of_numpy, by_another_name])
def test_draws_of_forward_are_refused_while_others_draw(draws: Callable[[Tensor], Tensor]) -> None:
    class Drawing(Perceptron):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(draws(x))

    with beside(draw), pytest.raises(CaptureError, match="draws random numbers from"):
        stowplan.fit(Drawing(), (torch.ones(8, 16),), budget="1MiB")


def test_a_refusal_of_draws_leaves_generators_alone_while_idle_threads_live() -> None:
    class Drawing(Perceptron):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(of_numpy(of_python(x)))

    before = random.getstate(), pickle.dumps(np.random.get_state())
    with beside(), beside(lambda: None), pytest.raises(CaptureError, match="draws random numbers from"):
        stowplan.fit(Drawing(), (torch.ones(8, 16),), budget="1MiB")
    assert (random.getstate(), pickle.dumps(np.random.get_state())) == before


def test_a_module_of_another_thread_runs_as_it_is_while_one_is_captured() -> None:
    """Hooks and modules of a thread that trains in eager meanwhile are its own."""
    model, entered = Perceptron(), Event()
    seen: list[str] = []

    class Slow(Perceptron):
        def forward(self, x: Tensor) -> Tensor:
            entered.set()
            for _ in range(50):
                x = super().forward(x) + x
            return x.sum()

    def train() -> None:
        entered.wait()
        for _ in range(50):
            model(torch.ones(3, 16)).backward()
            seen.extend(map(repr, nn.modules.module._global_forward_hooks.values()))

    works: list[Callable[[], Any]] = [
        train,
        lambda: stowplan.fit(Slow(), (torch.ones(6, 16),), budget="1GiB", search=Search(moves=10)),
    ]
    in_threads(works)
    assert not seen


class FitsForEach(Dataset[Tensor]):
    """Each item is the loss of a step that was planned where the item is made."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, place: int) -> Tensor:
        return losses_of(Training(place % len(KINDS), seed=place))


def losses_of(training: Training) -> Tensor:
    return torch.stack(training.planned()[:3])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_fit_in_a_worker_of_a_data_loader(method: str) -> None:
    Training(0, seed=1).planned()  # the parent has fitted too
    loader = DataLoader(FitsForEach(), batch_size=None, num_workers=2, multiprocessing_context=method)
    for place, losses in enumerate(loader):
        assert_same(list(losses), Training(place % len(KINDS), seed=place).eager()[:3])


_FORKS = """
import os, signal, sys, threading, time
import torch
from torch import nn
import stowplan

entered, go_on = threading.Event(), threading.Event()

class Waits(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x):
        entered.set()
        go_on.wait()
        return self.layer(x).sum()

thread = threading.Thread(target=stowplan.fit, args=(Waits(), (torch.ones(3, 4),)), kwargs={"budget": "1MiB"})
thread.start()
entered.wait()
child = os.fork()  # while another thread captures
if child == 0:
    signal.alarm(60)
    assert "__getattribute__" not in vars(nn.Module)
    layer = nn.Linear(4, 4)
    fitted = stowplan.fit(layer, (torch.ones(3, 4),), budget="1MiB", loss=torch.sum)
    fitted(torch.ones(3, 4)).backward()
    os._exit(0)
assert "__getattribute__" in vars(nn.Module)
assert os.waitpid(child, 0)[1] == 0, "the child did not end well"
go_on.set()
thread.join()
assert "__getattribute__" not in vars(nn.Module)
print("both fitted")
"""


@pytest.mark.slow
def test_a_child_that_is_forked_while_another_thread_captures_can_fit() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _FORKS], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.stdout == "both fitted\n", run.stderr


def _fit_in_child(results: Any) -> None:
    results.put([each.numpy() for each in Training(1, seed=3).planned()])


@pytest.mark.slow
def test_fit_in_a_child_that_is_forked_while_threads_fit() -> None:
    context = multiprocessing.get_context("fork")
    Training(
        3, seed=1
    ).planned()  # what is imported at the first capture is there: a child cannot wait for it

    def fork() -> list[Tensor]:
        results = context.SimpleQueue()
        child = context.Process(target=_fit_in_child, args=(results,))
        child.start()
        found = [torch.from_numpy(each) for each in results.get()]
        child.join()
        assert child.exitcode == 0
        return found

    works: list[Callable[[], Any]] = [Training(0, seed=2).planned, fork, Training(2, seed=4).planned, fork]
    expected = [Training(0, seed=2), Training(1, seed=3), Training(2, seed=4), Training(1, seed=3)]
    for found, training in zip(in_threads(works), expected, strict=True):
        assert_same(found, training.eager())
