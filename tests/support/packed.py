"""Small wrapper subclasses: weights in eight bits with scales, as packages for quantisation make them."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

aten = torch.ops.aten
_ON_PARTS = (aten.detach.default, aten.clone.default)


class Packed(Tensor):
    """Integers of eight bits, and a scale for each `group` of them. Ops on it run on what it unpacks to."""

    numbers: Tensor
    scales: Tensor
    group: int

    @staticmethod
    def __new__(cls, numbers: Tensor, scales: Tensor, group: int) -> "Packed":
        make: Any = torch.Tensor._make_wrapper_subclass
        look = {"dtype": scales.dtype, "device": numbers.device, "requires_grad": False}
        made: Packed = make(cls, numbers.shape, **look)
        return made

    def __init__(self, numbers: Tensor, scales: Tensor, group: int) -> None:
        self.numbers, self.scales, self.group = numbers, scales, group

    @classmethod
    def of(cls, weight: Tensor, group: int = 16) -> "Packed":
        """A weight with rounded numbers."""
        rows = weight.detach().reshape(-1, group)
        scales = rows.abs().amax(1, keepdim=True) / 127
        return cls((rows / scales).round().to(torch.int8).view(weight.shape), scales, group)

    def unpacked(self) -> Tensor:
        """A plain tensor of the same numbers."""
        return (self.numbers.view(-1, self.group) * self.scales).view(self.shape)

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, object]]:
        return ["numbers", "scales"], {"group": self.group}

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, Tensor], metadata: Mapping[str, Any], _size: object, _stride: object
    ) -> "Packed":
        return cls(inner["numbers"], inner["scales"], metadata["group"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub is of a function, not of a class method
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _ON_PARTS:
            return cls(func(args[0].numbers), func(args[0].scales), args[0].group)
        if func is aten.copy_.default:
            args[0].numbers.copy_(args[1].numbers)
            args[0].scales.copy_(args[1].scales)
            return args[0]
        plain, named = tree_map(_unpacked, (args, dict(kwargs or {})))
        return func(*plain, **named)


def _unpacked(value: object) -> object:
    return value.unpacked() if isinstance(value, Packed) else value


class Adapted(nn.Module):
    """A linear layer whose frozen weight may be packed, and a trained adapter beside it."""

    def __init__(self, size: int, kind: type[Packed] | None = Packed, group: int = 16) -> None:
        super().__init__()
        self.base = nn.Linear(size, size, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(size, 4, bias=False), nn.Linear(4, size, bias=False)
        if kind is not None:
            self.base.weight = nn.Parameter(kind.of(self.base.weight, group), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base(x) + self.up(self.down(x))
        return made


class AdaptedNet(nn.Module):
    """Several of them."""

    def __init__(self, size: int = 64, layers: int = 3, kind: type[Packed] | None = Packed) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Adapted(size, kind) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.square().mean()
