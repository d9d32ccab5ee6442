"""What an entry gives: networks, arguments to fit them with, optimizers, and one iteration of its loop."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Arguments: TypeAlias = tuple[Any, ...]
Networks: TypeAlias = Mapping[str, nn.Module]
Iteration: TypeAlias = Callable[[Networks, Sequence[Optimizer], int], list[Tensor]]
Optimizers: TypeAlias = Callable[[Networks], Sequence[Optimizer]]


@dataclass(frozen=True, slots=True)
class Training:
    """`iteration` zeroes gradients, runs forward, backward and the steps, and returns its losses.

    Each network of `arguments` is fitted, with these arguments; the others stay as they are. `outputs` is
    that of `fit`: "all" if the loop computes the loss.
    """

    networks: Networks
    arguments: Mapping[str, Arguments]
    optimizers: Optimizers
    iteration: Iteration
    outputs: str = "loss"


@dataclass(frozen=True, slots=True)
class Entry:
    """One repository. `change` is what a user has to change, `absent` packages that nothing here runs."""

    name: str
    repository: str
    commit: str
    part: str
    make: Callable[[Path], Training]
    folders: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    note: str = ""
    change: str = ""


ENTRIES: dict[str, Entry] = {}


def entry(
    repository: str, commit: str, part: str, *, name: str = "", **more: Any
) -> Callable[[Callable[[Path], Training]], Callable[[Path], Training]]:
    """Register the function below, which takes the checkout, under the repository's name or `name`."""

    def register(make: Callable[[Path], Training]) -> Callable[[Path], Training]:
        key = name or repository.partition("/")[2]
        if key in ENTRIES:
            raise ValueError(f"two entries are called {key}")
        ENTRIES[key] = Entry(key, repository, commit, part, make, **more)
        return make

    return register


class Step(nn.Module):
    """A network and its loss as one module, as docs/how-to.md advises."""

    def __init__(self, net: nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, *args: Any) -> Tensor:
        found: Tensor = self.loss(self.net, *args)
        return found


def one(
    net: nn.Module,
    batches: Callable[[torch.Generator], Arguments],
    loss: Callable[..., Any] | None = None,
    *,
    optimizer: Callable[[Iterable[Tensor]], Optimizer] = lambda p: torch.optim.AdamW(p, 1e-3),
    after: Callable[[nn.Module], None] = lambda _: None,
) -> Training:
    """One network that is called with a batch and returns its loss; `loss(net, *batch)` computes it if not.

    `after` is what the loop does with the network after the optimizer's step.
    """
    model = net if loss is None else Step(net, loss)

    def iteration(networks: Networks, optimizers: Sequence[Optimizer], seed: int) -> list[Tensor]:
        found: Tensor = networks["model"](*batches(drawn(seed)))
        torch.autograd.backward(found)
        for each in optimizers:
            each.step()
        after(net)
        return [found]

    def optimizers(networks: Networks) -> Sequence[Optimizer]:
        return [optimizer([p for p in networks["model"].parameters() if p.requires_grad])]

    return Training({"model": model.train()}, {"model": batches(drawn(0))}, optimizers, iteration)


def looped(
    net: nn.Module,
    batches: Callable[[torch.Generator], Arguments],
    loss: Callable[..., Any],
    *,
    given: int = 1,
    optimizer: Callable[[Iterable[Tensor]], Optimizer] = lambda p: torch.optim.AdamW(p, 1e-3),
) -> Training:
    """One network that takes the first `given` values of a batch; `loss(net, *batch)` is the loop's."""

    def iteration(networks: Networks, optimizers: Sequence[Optimizer], seed: int) -> list[Tensor]:
        found: Tensor = loss(networks["model"], *batches(drawn(seed)))
        torch.autograd.backward(found)
        for each in optimizers:
            each.step()
        return [found]

    def optimizers(networks: Networks) -> Sequence[Optimizer]:
        return [optimizer([p for p in networks["model"].parameters() if p.requires_grad])]

    arguments = {"model": batches(drawn(0))[:given]}
    return Training({"model": net.train()}, arguments, optimizers, iteration, outputs="all")


def drawn(seed: int) -> torch.Generator:
    """The generator of one batch."""
    return torch.Generator().manual_seed(seed)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
