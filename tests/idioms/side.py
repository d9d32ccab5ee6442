"""Side: what an idiom is given; the same program runs on the side of eager and on the side of plans.

A program makes its model, hands it to `fit`, trains the result as it would the model, and tells what it sees.
What is compared in the end: all that was told, and of every model the parameters, gradients and buffers, and
the state of the generators.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

import stowplan
from stowplan.plan.plan import Plan

Model = TypeVar("Model", bound=nn.Module)
Program = Callable[["Side"], None]

ROOMY = "1GiB"


@dataclass(frozen=True, slots=True)
class Idiom:
    """A program, where it is from, and words of its refusal if it is refused."""

    name: str
    source: str
    program: Program
    refused: str = ""


IDIOMS: dict[str, Idiom] = {}


def idiom(source: str, *, refused: str = "") -> Callable[[Program], Program]:
    """Add a program to the idioms."""

    def add(program: Program) -> Program:
        assert program.__name__ not in IDIOMS, program.__name__
        IDIOMS[program.__name__] = Idiom(program.__name__, source, program, refused)
        return program

    return add


class Side:
    """Eager's side, where `fit` returns the model itself, or the side of plans."""

    def __init__(self, *, by_plans: bool) -> None:
        self.by_plans = by_plans
        self.fitted: list[nn.Module] = []
        self.seen: list[tuple[str, object]] = []
        self._models: list[nn.Module] = []

    def fit(self, model: Model, *args: object, **options: Any) -> Model:
        """The model, or what `stowplan.fit` makes of it."""
        self._models.append(model)
        if self.by_plans:
            fitted = stowplan.fit(model, args, **({"budget": ROOMY} | options))
            self.fitted.append(fitted)
            return fitted
        loss = options.get("loss")
        return _WithLoss(model, loss) if callable(loss) else model  # type: ignore[return-value]

    def see(self, name: str, value: object) -> None:
        """Compare this value with the other side's."""
        self.seen.append((name, _kept(value)))

    @property
    def plans(self) -> list[tuple[Plan, ...]]:
        """Of each fitted model its plans."""
        return [stowplan.plans_of(fitted) for fitted in self.fitted]

    def run(self, program: Program) -> list[tuple[str, object]]:
        """All that is compared, from the same seeds on both sides."""
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        program(self)
        for place, model in enumerate(self._models):
            for name, parameter in model.named_parameters():
                self.see(f"{place}.{name}", parameter)
                self.see(f"{place}.{name}.grad", parameter.grad)
                self.see(f"{place}.{name}.requires_grad", parameter.requires_grad)
            for name, buffer in model.named_buffers():
                self.see(f"{place}.{name}", buffer)
        self.see("generator", torch.get_rng_state())
        self.see("random", random.getstate())
        return self.seen


class _WithLoss(nn.Module):
    """A model and the function that follows it: what `loss=` makes one of."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *args: object, **kwargs: object) -> Any:
        return self.loss(self.model(*args, **kwargs))


def differing(eager: Sequence[tuple[str, object]], planned: Sequence[tuple[str, object]]) -> list[str]:
    """The names of what is not the same to the bit."""
    if [name for name, _ in eager] != [name for name, _ in planned]:
        return ["what was seen"]
    return [name for (name, one), (_, other) in zip(eager, planned, strict=True) if not _same(one, other)]


def _kept(value: object) -> object:
    """The value as it is now."""
    if isinstance(value, Tensor):
        dense = value.detach().to_dense() if value.is_sparse else value.detach()
        return dense.clone().contiguous()
    if isinstance(value, Mapping):
        return {key: _kept(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_kept(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _kept(getattr(value, field.name)) for field in fields(value)}
    return value


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = (one.shape, one.dtype) == (other.shape, other.dtype)
        return alike and _bytes(one) == _bytes(other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


def _bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
