"""A case of the zoo: a model that returns its loss, and a batch of arguments for each seed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch: TypeAlias = Mapping[str, Any]
Batches: TypeAlias = Callable[[int], Batch]
LossOf: TypeAlias = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """`package` has to be installed; `make` imports it."""

    package: str
    name: str
    make: Callable[[], nn.Module]
    batches: Batches
    loss: LossOf


class Training(nn.Module):
    """A net and its loss as one module, called with the batch by name."""

    def __init__(self, net: nn.Module, loss: LossOf) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, **batch: Any) -> Tensor:
        return self.loss(self.net, batch)


def package(name: str) -> Any:
    """A module of a package that may lack types."""
    return import_module(name)


def drawn(seed: int) -> torch.Generator:
    """The generator of one batch."""
    return torch.Generator().manual_seed(seed)


def own_loss(net: nn.Module, batch: Batch) -> Tensor:
    """The loss that the model itself returns."""
    loss: Tensor = net(**batch).loss
    return loss


def classified(net: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of one or several outputs."""
    found = net(batch["x"])
    outputs = found if isinstance(found, (tuple, list)) else [found]
    return torch.stack([F.cross_entropy(output, batch["y"]) for output in outputs]).sum()


def squared(net: nn.Module, batch: Batch) -> Tensor:
    """The mean square of all outputs, where a model has no loss of its own."""
    found = net(**batch)
    values = found.to_tuple() if hasattr(found, "to_tuple") else found
    outputs = values if isinstance(values, (tuple, list)) else [values]
    leaves = [leaf for leaf in outputs if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([leaf.float().square().mean() for leaf in leaves]).sum()


def images(count: int, size: int, classes: int = 10, *, dense: bool = False, dims: int = 2) -> Batches:
    """Images and a class for each, or for each pixel."""

    def batch(seed: int) -> Batch:
        draw, extent = drawn(seed), (size,) * dims
        labels = (count, *extent) if dense else (count,)
        return {
            "x": torch.randn(count, 3, *extent, generator=draw),
            "y": torch.randint(0, classes, labels, generator=draw),
        }

    return batch
