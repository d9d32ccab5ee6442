"""PyTorch's own databases of ops, modules and optimizers, each entry as a training step for `fit`.

Each entry makes two iterations with different values, in eager and planned, and everything is compared to the
bit: losses, gradients, parameters, buffers. An entry is equal, or refused with a cause; anything else is a
fault.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db

import stowplan
from stowplan.errors import StowplanError

BUDGET = "1GiB"


class Outcome(StrEnum):
    EQUAL = "equal"
    REFUSED = "refused"
    DIFFERENT = "different"
    UNTYPED = "untyped error"
    NOT_EAGER = "no eager step"  # eager raises, or does not repeat itself

    @property
    def is_fault(self) -> bool:
        """Whether fit was wrong, or failed without an error of its own."""
        return self in (Outcome.DIFFERENT, Outcome.UNTYPED)


@dataclass(frozen=True, slots=True)
class Entry:
    """One sample of a database, and how to make the step of it; `settings` are for fit."""

    database: str
    name: str
    make: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What became of an entry, and why."""

    outcome: Outcome
    cause: str = ""


def _spread(samples: Iterable[Any], most: int | None) -> Iterator[tuple[int, Any]]:
    """So many of the samples, from first to last; all without a limit."""
    listed = list(enumerate(samples))
    return iter(listed if most is None else listed[:: max(1, len(listed) // most)][:most])


def op_entries(dtype: torch.dtype, most: int | None, *, every: int = 1) -> Iterator[Entry]:
    """Samples of each op that has a gradient, at most so many of one op; of every so many ops."""
    op: Any
    for op in op_db[::every]:
        if dtype not in op.supported_backward_dtypes("cpu") or not op.supports_autograd:
            continue
        full = ".".join(filter(None, (op.name, op.variant_test_name)))
        try:
            samples = list(op.sample_inputs("cpu", dtype, requires_grad=True))
        except Exception:
            continue
        for number, sample in _spread(samples, most):

            def make(op: Any = op, sample: Any = sample) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
                return OpStep(op, sample), (torch.ones(2),), {}

            yield Entry(f"op_db, {str(dtype).removeprefix('torch.')}", f"{full} {number}", make)


def module_entries(most: int | None, *, every: int = 1) -> Iterator[Entry]:
    """Samples of each module in training and evaluation."""
    for info in module_db[::every]:
        for training in (True, False):
            samples = info.module_inputs_func(
                info, "cpu", torch.float32, requires_grad=True, training=training
            )
            for number, sample in _spread(samples, most):

                def make(
                    info: Any = info, sample: Any = sample, training: bool = training
                ) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
                    constructor, forward = sample.constructor_input, sample.forward_input
                    module = info.module_cls(*constructor.args, **constructor.kwargs).train(training)
                    return ModuleStep(module), (torch.ones(2), *forward.args), dict(forward.kwargs)

                mode = "train" if training else "eval"
                yield Entry("module_db", f"{info.name} {number}, {mode}", make)


def optimizer_entries(*, every: int = 1) -> Iterator[Entry]:
    """Each optimizer with each of its settings, through `optimizer=`."""
    for info in optim_db[::every]:
        for setting in info.optim_inputs_func(device="cpu"):
            kind: Any = info.optim_cls
            named = setting.kwargs

            def make() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
                return Regression(), (torch.linspace(-1, 1, 32).view(8, 4),), {}

            def optimizer(model: nn.Module, kind: Any = kind, named: Any = named) -> torch.optim.Optimizer:
                made: torch.optim.Optimizer = kind(list(model.parameters()), **copy.deepcopy(named))
                return made

            yield Entry("optim_db", f"{kind.__name__} {setting.desc or 'default'}", make, optimizer)


class Regression(nn.Module):
    """A small network with weights of two dims, so that every optimizer takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 2, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.net(x).square().mean()
        return loss


class OpStep(nn.Module):
    """One op on parameters, and a scalar of what it gives."""

    def __init__(self, op: Any, sample: Any) -> None:
        super().__init__()
        self.op, self.held = op, nn.ParameterList()
        self.given = self._taken((sample.input, tuple(sample.args), dict(sample.kwargs)))

    def _taken(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.requires_grad and value.is_floating_point() and value.layout is torch.strided:
                self.held.append(nn.Parameter(value.detach().clone(memory_format=torch.preserve_format)))
                return _Held(len(self.held) - 1)
            return value.detach()
        if isinstance(value, dict):
            return {key: self._taken(item) for key, item in value.items()}
        return type(value)(map(self._taken, value)) if type(value) in (tuple, list) else value

    def _put(self, value: Any) -> Any:
        if isinstance(value, _Held):
            return self.held[value.number] * 1.0
        if isinstance(value, dict):
            return {key: self._put(item) for key, item in value.items()}
        return type(value)(map(self._put, value)) if type(value) in (tuple, list) else value

    def forward(self, x: Tensor) -> Tensor:
        first, args, kwargs = self._put(self.given)
        return total_of(self.op(first, *args, **kwargs), x.sum())


@dataclass(frozen=True, slots=True)
class _Held:
    number: int


class ModuleStep(nn.Module):
    """A module, and a scalar of what it gives."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.scale = module, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = [a * 1.0 if isinstance(a, Tensor) and a.requires_grad else a for a in args]
        return total_of(self.module(*given, **kwargs), x.sum() * self.scale)


def total_of(made: Any, total: Tensor) -> Tensor:
    """A scalar that depends on every element, so that no gradient is only ones."""
    if isinstance(made, Tensor):
        real = torch.view_as_real(made.resolve_conj()) if made.is_complex() else made
        if not real.is_floating_point() or real.layout is not torch.strided:
            return total
        return total + (real.float() * real.float().cos()).sum()
    for item in made if isinstance(made, (list, tuple)) else ():
        total = total_of(item, total)
    return total


def _iterations(
    model: Any, args: Sequence[Any], kwargs: dict[str, Any], optimizer: torch.optim.Optimizer | None
) -> list[Tensor | None]:
    """What two iterations leave behind; between them the values change."""
    found: list[Tensor | None] = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        if optimizer is None:
            model.zero_grad()
        loss = model(*args, **kwargs)
        loss.backward()
        found += [loss.detach().clone(), *(b.detach().clone() for b in model.buffers())]
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
            found += (p.detach().clone() for p in model.parameters())
            continue
        found += (None if p.grad is None else p.grad.clone() for p in model.parameters())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.75)
    return found


def _same(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> bool:
    return len(one) == len(other) and all(map(_same_bits, one, other))


def _same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(torch.nan_to_num(one, nan=7.0), torch.nan_to_num(other, nan=7.0))


def result_of(entry: Entry) -> Result:
    """Run an entry in eager and planned."""
    try:
        torch.manual_seed(0)
        model, args, kwargs = entry.make()
        models = [copy.deepcopy(model) for _ in range(3)]
        rules = [entry.optimizer(each) if entry.optimizer else None for each in models]
        eager, again = (_iterations(m, args, kwargs, r) for m, r in zip(models[:2], rules, strict=False))
    except Exception as error:
        return Result(Outcome.NOT_EAGER, f"{type(error).__name__}: {error}")
    if not _same(eager, again):
        return Result(Outcome.NOT_EAGER, "eager differs from itself")
    try:
        fitted = stowplan.fit(
            models[2], args, kwargs, budget=BUDGET, optimizer=rules[2], moves=3, allow=("recompute",)
        )
        planned = _iterations(fitted, args, kwargs, rules[2])
    except StowplanError as refusal:
        return Result(Outcome.REFUSED, f"{type(refusal).__name__}: {refusal}")
    except Exception as error:
        return Result(Outcome.UNTYPED, f"{type(error).__name__}: {error}")
    if _same(eager, planned):
        return Result(Outcome.EQUAL)
    claims = {str(plan.exactness) for plan in stowplan.plans_of(fitted)}
    return Result(Outcome.DIFFERENT, f"called {', '.join(sorted(claims))}")
