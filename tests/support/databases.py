"""PyTorch's own databases of ops, modules and optimizers, each entry as a training step for stowplan.

Each entry makes two iterations with different values, in eager and planned in three ways, and everything is
compared to the bit: losses, gradients, parameters, buffers. What becomes of an entry in each way is that it
is equal, or refused with a cause; anything else is a fault.
"""

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db
from torch.testing._internal.custom_op_db import custom_op_db
from torch.testing._internal.hop_db import hop_db

import stowplan
from stowplan import Search
from stowplan.errors import BudgetTooSmall, StowplanError
from stowplan.run.backend.compile import plans_for

ROOMY = "1GiB"
MODULES: Sequence[Any] = module_db
OPTIMIZERS: Sequence[Any] = optim_db
OP_DATABASES: Mapping[str, Sequence[Any]] = {"op_db": op_db, "hop_db": hop_db, "custom_op_db": custom_op_db}


class Setup(StrEnum):
    """How a step is planned."""

    ROOMY = "roomy"  # fit, with a budget that asks for nothing
    TIGHT = "tight"  # fit, with the smallest budget that its refusal names
    COMPILED = "torch.compile"  # the backend of torch.compile


class Outcome(StrEnum):
    """What became of a step."""

    EQUAL = "equal"
    REFUSED = "refused"
    DIFFERENT = "different"
    UNTYPED = "untyped error"
    LATE = "late"  # refused after it was planned, or at the budget that the refusal named
    CRASHED = "crashed"  # the process ended, or gave no answer
    NOT_EAGER = "no eager step"  # eager raises, or does not repeat itself

    @property
    def is_fault(self) -> bool:
        """Whether stowplan was wrong, or failed without an error of its own, or too late."""
        return self not in (Outcome.EQUAL, Outcome.REFUSED, Outcome.NOT_EAGER)


@dataclass(frozen=True, slots=True)
class Entry:
    """One sample of a database, and how to make the step of it, with its optimizer if it has one."""

    database: str
    name: str
    make: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What became of an entry, and why."""

    outcome: Outcome
    cause: str = ""


_LOOKED_AT = 16  # for each sample that is taken: some ops have over a thousand


def _spread(samples: Iterable[Any], most: int | None) -> Iterator[tuple[int, Any]]:
    """So many of the samples, spread over the first ones; all without a limit."""
    if most is None:
        return enumerate(samples)
    listed = list(islice(enumerate(samples), most if most == 1 else _LOOKED_AT * most))
    return iter(listed[:: max(1, len(listed) // most)][:most])


def is_differentiated(op: Any, dtype: torch.dtype) -> bool:
    """Whether an op of a database has a gradient in this dtype."""
    return bool(op.supports_autograd) and dtype in op.supported_backward_dtypes("cpu")


def op_entries(
    database: str, dtype: torch.dtype, most: int | None, part: slice = slice(None)
) -> Iterator[Entry]:
    """Samples of each op in this part of a database that has a gradient, at most so many of one op."""
    op: Any
    for op in OP_DATABASES[database][part]:
        if not is_differentiated(op, dtype):
            continue
        full = ".".join(filter(None, (op.name, op.variant_test_name)))
        _seed(0)
        try:
            samples = list(_spread(op.sample_inputs("cpu", dtype, requires_grad=True), most))
        except Exception:
            continue
        for number, sample in samples:

            def make(op: Any = op, sample: Any = sample) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
                return OpStep(op, sample), (torch.ones(2),), {}

            yield Entry(f"{database}, {str(dtype).removeprefix('torch.')}", f"{full} {number}", make)


def module_entries(most: int | None, part: slice = slice(None)) -> Iterator[Entry]:
    """Samples of each module in this part of the database, in training and evaluation."""
    for info in MODULES[part]:
        for training in (True, False):
            _seed(0)
            samples = info.module_inputs_func(
                info, "cpu", torch.float32, requires_grad=True, training=training
            )
            for number, sample in _spread(samples, most):

                def make(
                    info: Any = info, sample: Any = sample, training: bool = training
                ) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
                    constructor, forward = sample.constructor_input, sample.forward_input
                    module = info.module_cls(*constructor.args, **constructor.kwargs).train(training)
                    if any(map(is_lazy, module.parameters())):  # then fit asks for one call before
                        module(*forward.args, **forward.kwargs)
                    return ModuleStep(module), (torch.ones(2), *forward.args), dict(forward.kwargs)

                mode = "train" if training else "eval"
                yield Entry("module_db", f"{info.name} {number}, {mode}", make)


def optimizer_entries(part: slice = slice(None)) -> Iterator[Entry]:
    """Each optimizer in this part of the database with each of its settings, through `optimizer=`."""
    for info in OPTIMIZERS[part]:
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
            if value.requires_grad and value.layout is torch.strided:
                self.held.append(nn.Parameter(value.detach().clone(memory_format=torch.preserve_format)))
                return _Held(len(self.held) - 1)
            if value.is_floating_point() and value.layout is torch.strided:  # the op may write into it
                self.register_buffer(name := f"buffer_{len(self._buffers)}", value.detach().clone())
                return _Buffer(name)
            return value.detach()
        if isinstance(value, dict):
            return {key: self._taken(item) for key, item in value.items()}
        return type(value)(map(self._taken, value)) if type(value) in (tuple, list) else value

    def _put(self, value: Any) -> Any:
        if isinstance(value, _Held):
            return self.held[value.number] * 1.0
        if isinstance(value, _Buffer):
            return self.get_buffer(value.name)
        if isinstance(value, dict):
            return {key: self._put(item) for key, item in value.items()}
        return type(value)(map(self._put, value)) if type(value) in (tuple, list) else value

    def forward(self, x: Tensor) -> Tensor:
        first, args, kwargs = self._put(self.given)
        return total_of(self.op(first, *args, **kwargs), x.sum())


@dataclass(frozen=True, slots=True)
class _Held:
    number: int


@dataclass(frozen=True, slots=True)
class _Buffer:
    name: str


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


def results_of(entry: Entry, ways: Iterable[Setup] = tuple(Setup)) -> dict[Setup, Result]:
    """Run an entry in eager, and in each of these ways."""
    try:
        _seed(0)
        model, args, kwargs = entry.make()
        eager, again = (_Loop(entry, model, args, kwargs).run() for _ in range(2))
    except Exception as error:
        return dict.fromkeys(ways, Result(Outcome.NOT_EAGER, _told(error)))
    if not _same(eager, again):
        return dict.fromkeys(ways, Result(Outcome.NOT_EAGER, "eager differs from itself"))
    return {way: _judged(way, _Loop(entry, model, args, kwargs), eager) for way in ways}


class _Loop:
    """Two iterations of an entry on a model of its own; between them the values change."""

    def __init__(self, entry: Entry, model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.model, self.args, self.kwargs = copy.deepcopy(model), args, kwargs
        self.optimizer = entry.optimizer(self.model) if entry.optimizer else None
        self.step: Any = self.model
        self.taken = 0  # iterations

    def run(self) -> list[Tensor | None]:
        """What both iterations leave behind."""
        return [*self.iteration(3), *self.iteration(4)]

    def iteration(self, seed: int) -> Iterator[Tensor | None]:
        _seed(seed)
        if self.optimizer is None:
            self.model.zero_grad()
        loss = self.step(*self.args, **self.kwargs)
        loss.backward()
        yield loss.detach().clone()
        yield from (b.detach().clone() for b in self.model.buffers())
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield from (p.detach().clone() for p in self.model.parameters())
        else:
            yield from (None if p.grad is None else p.grad.clone() for p in self.model.parameters())
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(0.75)
        self.taken += 1

    def plan(self, way: Setup) -> Callable[[], Iterable[stowplan.Plan]]:
        """Have the step planned; the plans are there when it has run."""
        if way is Setup.COMPILED:
            torch._dynamo.reset()
            options: dict[str, Any] = {"budget": ROOMY, "moves": 3}
            self.step = torch.compile(self.model, backend="stowplan", options=options)
            return lambda: plans_for(options)
        budget: str | int = ROOMY if way is Setup.ROOMY else 1
        for _ in range(4):
            try:
                self.step = stowplan.fit(
                    self.model,
                    tuple(self.args),
                    self.kwargs,
                    budget=budget,
                    optimizer=self.optimizer,
                    search=Search(moves=3),
                    allow=("recompute",),
                )
                break
            except BudgetTooSmall as refusal:
                if refusal.minimum_bytes == budget:
                    raise _Late(str(refusal)) from None
                budget = refusal.minimum_bytes
        return lambda: stowplan.plans_of(self.step)


class _Late(Exception):
    """A refusal at the budget that a refusal named."""


def _judged(way: Setup, loop: _Loop, eager: Sequence[Tensor | None]) -> Result:
    try:
        plans = loop.plan(way)
        planned = loop.run()
    except StowplanError as refusal:
        at_first = loop.step is loop.model or (way is Setup.COMPILED and not loop.taken)
        return Result(Outcome.REFUSED if at_first else Outcome.LATE, _told(refusal))
    except _Late as late:
        return Result(Outcome.LATE, str(late))
    except Exception as error:
        return Result(Outcome.UNTYPED, _told(error))
    if _same(eager, planned):
        return Result(Outcome.EQUAL)
    return Result(Outcome.DIFFERENT, f"called {', '.join(sorted({str(plan.exactness) for plan in plans()}))}")


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def _same(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> bool:
    return len(one) == len(other) and all(map(_same_bits, one, other))


def _same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(torch.nan_to_num(one, nan=7.0), torch.nan_to_num(other, nan=7.0))
