"""Net: a network with two sizes of example input, built from code, a seed and a device.

The convention of every example: the model is called with all its arguments, the target last, and returns
the scalar loss. An example is thereby a plain `(model, args)` pair.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from stowplan.errors import BadUse

Size: TypeAlias = Literal["tiny", "real"]
Settings: TypeAlias = Mapping[str, object]


class Example(NamedTuple):
    """A training step: `model(*args)` is the scalar loss to differentiate."""

    model: nn.Module
    args: tuple[Tensor, ...]


class Supervised(nn.Module):
    """A network and its criterion as one module: the last argument is the target, the result the loss."""

    def __init__(self, network: nn.Module, criterion: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.network = network
        self.criterion = criterion

    def forward(self, *args: Tensor) -> Tensor:
        *inputs, target = args
        return self.criterion(self.network(*inputs), target)


@dataclass(frozen=True, slots=True)
class Net:
    """A family of networks. `make` takes the settings of a size by name and returns an example."""

    name: str
    about: str
    make: Callable[..., Example]
    tiny: Settings
    real: Settings

    def settings(self, size: Size) -> Settings:
        """What `make` is called with: "tiny" runs in a blink, "real" is worth measuring."""
        return {"tiny": self.tiny, "real": self.real}[size]

    def build(
        self,
        size: Size = "tiny",
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        **overrides: object,
    ) -> Example:
        """The example of this size, with settings such as `batch` or `layers` overridden by name.

        The same seed gives the same weights and inputs. Nothing is allocated on the "meta" device.
        """
        settings = self.settings(size)
        if unknown := overrides.keys() - settings.keys():
            known = ", ".join(settings)
            raise BadUse(f"net {self.name!r} has no setting {', '.join(sorted(unknown))}; it has {known}")
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(seed)
            model, args = self.make(**{**settings, **overrides})
        return Example(model.to(dtype), tuple(_cast(arg, dtype) for arg in args))


def _cast(arg: Tensor, dtype: torch.dtype) -> Tensor:
    return arg.to(dtype) if arg.is_floating_point() else arg
