"""What a training step takes from the card and computes, with stowplan and without."""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.hollow_card.nets import Made

ITERATIONS = 3


@dataclass(frozen=True, slots=True)
class Run:
    """Losses and the last gradients or parameters, and the peaks as PyTorch counts them."""

    losses: tuple[float, ...]
    values: tuple[Tensor, ...]
    requested_bytes: int
    reserved_bytes: int

    def equals(self, other: "Run") -> bool:
        """To the bit."""
        return self.losses == other.losses and all(map(torch.equal, self.values, other.values))


def kept_by_cublas() -> int:
    """Bytes of the workspaces of forward's and of backward's thread, kept from the first product on."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    before = _requested_bytes()
    ones = torch.ones(8, 8, device="cuda", requires_grad=True)
    (ones @ ones).sum().backward()  # type: ignore[no-untyped-call]
    del ones
    return _requested_bytes() - before


def _requested_bytes() -> int:
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def on_card(make: Callable[[], Made]) -> Made:
    """A net with its arguments on the card: the same each time."""
    torch.manual_seed(0)
    model, args = make()
    there = {arg: arg.cuda() for arg in args}  # an argument that is given twice stays one tensor
    return model.cuda(), tuple(there[arg] for arg in args)


def trained(model: nn.Module, args: tuple[Tensor, ...], optimizer: Optimizer | None = None) -> Run:
    """Some iterations, with the same draws each time this is called."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    losses, values = [], list[Tensor]()
    for number in range(ITERATIONS):
        torch.manual_seed(number)
        loss = model(*args)
        loss.backward()
        losses.append(loss.item())
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        elif number == ITERATIONS - 1:
            values = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
        model.zero_grad(set_to_none=True)
    stats = torch.cuda.memory_stats()
    if optimizer is not None:
        values = [p.detach().cpu() for p in model.parameters()]
    peaks = (stats[f"{name}_bytes.all.peak"] for name in ("requested", "reserved"))
    return Run(tuple(losses), tuple(values), *peaks)
