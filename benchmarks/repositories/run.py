"""Trains an entry in eager and in each way of stowplan, in a process of its own, and compares to the bit.

Compared are losses and gradients of each iteration, the state of PyTorch's generator after it, and at the end
parameters, buffers and the optimizers' state. Where a plan computes in tiles, only the losses and gradients
of the first iteration are compared, within rounding: updates amplify it.
"""

import json
import os
import random
import resource
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch._dynamo  # here, so that not each fork imports it
from torch import Tensor, nn
from torch.optim import Optimizer

import stowplan
from benchmarks.repositories.sources import commit_of, folder_of, prepare
from benchmarks.repositories.training import ENTRIES, Entry, Networks, Training, tensors_in
from stowplan import Search
from stowplan.errors import BudgetTooSmall, StowplanError
from stowplan.plan.draft import Exactness
from stowplan.plan.plan import Plan
from stowplan.run.backend.compile import plans_for
from stowplan.run.measure.measure import measure

_ROOMY = 2**40
_TIGHT = 0.7  # of eager's peak above parameters, buffers and arguments
_TIGHTER = 0.6
_MOVES = 10
_STEPS = (1, 2, 3)
_SEARCH = 2.0  # seconds of each search
_TRIES = (1.02, 1.1, 2.0)  # of the smallest budget that a refusal names, one after another
_SHOWN = 700  # letters of an error
_ROUNDING = 1e-3  # of the largest number of a tensor


class Setup(StrEnum):
    """The ways in which a network is trained by plans."""

    PLAIN = "plain"
    OPTIMIZER = "optimizer="
    BACKEND = "backend"
    TILES = "tiles, offload"


class Outcome(StrEnum):
    """What became of a way."""

    EQUAL = "equal"
    CLOSE = "within rounding"
    NOTHING = "nothing planned"
    REFUSED = "refused"
    WRONG = "wrong"
    OVER = "over budget"
    CRASHED = "crashed"
    TIME = "out of time"
    EAGER = "not in eager"
    ABSENT = "no snapshot"


FAULTS = (Outcome.WRONG, Outcome.OVER, Outcome.CRASHED)


@dataclass(frozen=True, slots=True)
class Result:
    """One way of one entry. Sizes are of the tight budget, and of the first network if there are several."""

    name: str
    way: str
    outcome: str
    words: str = ""
    eager_bytes: int = 0
    budget_bytes: int = 0
    planned_bytes: int = 0
    measured_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Trained:
    """What a run left, by name, in the order in which it is compared."""

    tensors: tuple[tuple[str, object], ...]
    fitted: "_Fitted"
    measured_bytes: int


@dataclass(frozen=True, slots=True)
class _Fitted:
    """What a way makes of the networks; `budget` is the first one's, optimizers are those it plans with."""

    networks: Networks
    plans: Sequence[Plan] = ()
    budget: int = 0
    optimizers: Sequence[Optimizer] = ()


Fitting = Callable[[Training], _Fitted]


class _Held(Optimizer):
    """An optimizer that does not step, while the memory of forward and backward is measured."""

    def __init__(self) -> None:
        super().__init__([nn.Parameter(torch.zeros(1))], {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Do nothing but call the closure."""
        if closure is not None:
            closure()


def _seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def _trained(make: Callable[[], Training], fitting: Fitting, *, gradients: bool = True) -> _Trained:
    """Make networks, fit them, and train."""
    _seed(0)
    training = make()
    fitted = fitting(training)
    optimizers = fitted.optimizers or training.optimizers(training.networks)
    _seed(100)
    found: list[tuple[str, object]] = []
    for step in _STEPS:
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = training.iteration(fitted.networks, optimizers, step)
        found += ((f"loss {i} of step {step}", loss.detach().clone()) for i, loss in enumerate(losses))
        if gradients:
            found += _gradients(training.networks, step)
        found.append((f"generator after step {step}", torch.get_rng_state()))
    for name, net in training.networks.items():
        found += ((f"{name}.{key}", _copy(value)) for key, value in net.state_dict().items())
        found += ((f"{name}.{key}", _copy(value)) for key, value in net.named_buffers())
    for optimizer in optimizers:
        found += ((name, _copy(value)) for name, value in _leaves(optimizer.state_dict(), "optimizer"))
    return _Trained(tuple(found), fitted, _measured(training, fitted, optimizers))


def _copy(value: object) -> object:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _measured(training: Training, fitted: _Fitted, optimizers: Sequence[Optimizer]) -> int:
    """The peak of one more iteration of one planned network with its loss, and the step if it is planned."""
    if len(training.networks) > 1 or len(fitted.plans) != 1 or training.outputs == "all":
        return 0
    for optimizer in optimizers:
        optimizer.zero_grad()
    (net,) = training.networks.values()
    standing = [tensor for tensor in (*net.parameters(), *net.buffers()) if tensor.layout == torch.strided]
    if fitted.optimizers:
        standing += tensors_in([optimizer.state_dict() for optimizer in optimizers])
    steps: Sequence[Optimizer] = fitted.optimizers or [_Held() for _ in optimizers]
    losses = list[Tensor]()
    run = lambda: losses.extend(training.iteration(fitted.networks, steps, _STEPS[-1]))  # noqa: E731
    return measure(run, before=standing).measured_peak_bytes


def _gradients(networks: Networks, step: int) -> Iterator[tuple[str, object]]:
    for name, net in networks.items():
        for key, parameter in net.named_parameters():
            gradient = parameter.grad
            kept = None if gradient is None else gradient.detach().clone()
            yield f"gradient of {name}.{key} in step {step}", kept


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from _leaves(item, f"{path}.{place}")
    else:
        yield path, value


def difference(expected: _Trained, found: _Trained, *, exact: bool) -> str:
    """The first thing that differs, or nothing. Not exact: the first iteration, within rounding."""
    one, other = expected.tensors, found.tensors
    if not exact:
        ends = [n for n, (name, _) in enumerate(one) if name.startswith("generator")]
        one, other = one[: ends[0]], other[: ends[0]]
    if [name for name, _ in one] != [name for name, _ in other]:
        return "other names: " + ", ".join(sorted({n for n, _ in one} ^ {n for n, _ in other})[:4])
    for (name, a), (_, b) in zip(one, other, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if words := _between(a, b, exact=exact):
                return f"{name} {words}"
        elif a is not b and a != b and not (a != a and b != b):
            return f"{name} is {b} in place of {a}"
    return ""


def _between(a: Tensor, b: Tensor, *, exact: bool) -> str:
    a, b = (t.detach().to_dense() if t.layout != torch.strided else t.detach() for t in (a, b))
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"is {b.dtype} {tuple(b.shape)} in place of {a.dtype} {tuple(a.shape)}"
    if torch.equal(a, b) or (torch.equal(a.isnan(), b.isnan()) and _same_numbers(a, b)):
        return ""
    apart = (a.double() - b.double()).abs().max().item()
    most = a.double().abs().max().item()
    return (
        "" if not exact and apart <= _ROUNDING * max(most, 1e-6) else f"differs by {apart:.1e} of {most:.1e}"
    )


def _same_numbers(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def _standing(net: nn.Module, arguments: object) -> int:
    tensors = (*net.parameters(), *net.buffers(), *tensors_in(arguments))
    storages = (t.untyped_storage() for t in tensors if t.layout == torch.strided)
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def _fitted(budgets: Callable[[str], int], *, optimizer: bool = False, **options: Any) -> Fitting:
    """Fit each network of `arguments`; a budget that is too small is raised to the smallest."""

    def fitting(training: Training) -> _Fitted:
        networks, plans, first = dict(training.networks), list[Plan](), 0
        optimizers = training.optimizers(training.networks) if optimizer else ()
        for place, (name, arguments) in enumerate(training.arguments.items()):
            more = {
                "outputs": training.outputs,
                "search": Search(time_limit=_SEARCH, moves=_MOVES),
                **options,
            }
            if optimizer:
                more["optimizer"] = optimizers[place]
            budget = budgets(name)
            for further in (*_TRIES, 0.0):
                try:
                    networks[name] = stowplan.fit(training.networks[name], arguments, budget=budget, **more)
                except BudgetTooSmall as refusal:
                    if not further:
                        raise
                    budget = int(refusal.minimum_bytes * further)
                else:
                    break
            plans += stowplan.plans_of(networks[name])
            first = first or budget
        return _Fitted(networks, plans, first, optimizers)

    return fitting


def _compiled(options: dict[str, Any]) -> Fitting:
    """Compile each network of `arguments` with the backend, under one budget."""

    def fitting(training: Training) -> _Fitted:
        torch._dynamo.reset()
        networks = dict(training.networks)
        for name in training.arguments:
            compiled = torch.compile(networks[name], backend="stowplan", options=options)
            networks[name] = cast("nn.Module", compiled)
        return _Fitted(networks, (), cast("int", options["budget"]))

    return fitting


class Attempt:
    """All ways of one entry, against one run in eager."""

    def __init__(self, name: str, make: Callable[[], Training]) -> None:
        self.name, self.make = name, make
        self.expected, again = (_trained(make, lambda training: _Fitted(training.networks)) for _ in "12")
        if words := difference(self.expected, again, exact=True):
            raise ValueError(f"eager differs from itself: {words}")
        self.standing: dict[str, int] = {}
        self.eager: dict[str, int] = {}
        self.is_sized = False

    def sized(self, training: Training) -> _Fitted:
        """Fit at a roomy budget, which tells of eager's peak."""
        self.is_sized = True
        fitted = _fitted(lambda _: _ROOMY)(training)
        for name, arguments in training.arguments.items():
            found = stowplan.plans_of(fitted.networks[name])
            self.standing[name] = _standing(training.networks[name], arguments)
            self.eager[name] = found[0].plain_peak_bytes if found else 0
        return fitted

    def plain(self) -> Result:
        """At a roomy budget and at a tight one."""
        first = self._way(Setup.PLAIN, self.sized)
        if first.outcome != Outcome.EQUAL:
            return first
        return self._way(Setup.PLAIN, _fitted(self._share(_TIGHT), allow=("recompute",)))

    def optimizer(self) -> Result:
        """The whole iteration: the tight budget, and room for two tensors of state for each parameter."""
        self._size()
        tight = self._share(_TIGHT)
        budgets = lambda name: tight(name) + 2 * self.standing.get(name, 0)  # noqa: E731
        return self._way(Setup.OPTIMIZER, _fitted(budgets, optimizer=True, allow=("recompute",)))

    def tiles(self) -> Result:
        """With everything allowed, in less."""
        self._size()
        return self._way(Setup.TILES, _fitted(self._share(_TIGHTER), allow=("recompute", "tile", "offload")))

    def backend(self) -> Result:
        """One budget for all graphs; the smallest if that is larger."""
        self._size()
        budget = int(0.9 * max(self.eager.values(), default=0)) or _ROOMY
        for further in (*_TRIES, 0.0):
            options: dict[str, Any] = {"budget": budget, "moves": _MOVES}
            try:
                result = self._way(Setup.BACKEND, _compiled(options), too_small=bool(further))
            except BudgetTooSmall as refusal:
                budget = int(refusal.minimum_bytes * further)
            else:
                if result.outcome == Outcome.EQUAL and not plans_for(options):
                    return replace(result, outcome=Outcome.NOTHING)
                return result
        raise AssertionError("the last try reports")

    def _size(self) -> None:
        if not self.is_sized:
            with suppress(StowplanError):  # a way that is refused is tried at a roomy budget
                _seed(0)
                self.sized(self.make())

    def _share(self, share: float) -> Callable[[str], int]:
        """Budgets of networks: what stands, and a share of what eager takes above it."""

        def budget(name: str) -> int:
            if not self.eager.get(name):
                return _ROOMY  # refused before, so nothing is known; the way is tried all the same
            return self.standing[name] + int((self.eager[name] - self.standing[name]) * share)

        return budget

    def _way(self, way: Setup, fitting: Fitting, *, too_small: bool = False) -> Result:
        begun = time.process_time()
        gradients = way is not Setup.OPTIMIZER
        result = Result(self.name, way, Outcome.EQUAL, eager_bytes=next(iter(self.eager.values()), 0))
        try:
            found = _trained(self.make, fitting, gradients=gradients)
        except Exception as error:
            if os.environ.get("TRACE"):
                traceback.print_exc()
            refusal = _typed(error)
            if isinstance(refusal, BudgetTooSmall) and too_small:
                raise refusal from None
            outcome = Outcome.REFUSED if refusal else Outcome.CRASHED
            result = replace(result, outcome=outcome, words=words_of(refusal or error))
        else:
            plans = found.fitted.plans
            exact = all(plan.exactness is Exactness.BITWISE for plan in plans)
            expected = self.expected if gradients else _without_gradients(self.expected)
            words = difference(expected, found, exact=True)
            if words and not exact:
                words = difference(expected, found, exact=False)
                result = replace(result, outcome=Outcome.CLOSE)
            if words:
                result = replace(result, outcome=Outcome.WRONG, words=words)
            budget, measured = found.fitted.budget, found.measured_bytes
            if measured > budget:
                result = replace(result, outcome=Outcome.OVER, words=f"{measured:,} of {budget:,} bytes")
            planned = plans[0].projected_peak_bytes if plans else 0
            result = replace(
                result,
                budget_bytes=budget,
                planned_bytes=planned,
                measured_bytes=measured,
                eager_bytes=next(iter(self.eager.values()), 0),
            )
        return replace(result, seconds=round(time.process_time() - begun, 1))


def _without_gradients(trained: _Trained) -> _Trained:
    kept = tuple(item for item in trained.tensors if not item[0].startswith("gradient "))
    return replace(trained, tensors=kept)


def _typed(error: BaseException | None) -> StowplanError | None:
    """The refusal that it is, or that Dynamo's error was made of."""
    if error is None or isinstance(error, StowplanError):
        return error
    return _typed(getattr(error, "inner_exception", None) or error.__cause__)


def words_of(error: BaseException) -> str:
    """The error in one line, with its type unless it is stowplan's."""
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{'' if isinstance(error, StowplanError) else type(error).__name__ + ': '}{text}"[:_SHOWN]


def run_here(name: str, folder: Path, report: Callable[[Result], object], ways: Sequence[Setup]) -> None:
    """All ways of an entry in this process; each is reported when it ends."""
    torch.set_num_threads(1)
    entry = ENTRIES[name]
    checkout = folder_of(folder, entry.repository)
    commit = commit_of(checkout)
    if commit != entry.commit:
        words = f"{checkout} is not there" if not commit else f"{checkout} is at {commit}, not {entry.commit}"
        report(Result(name, Setup.PLAIN, Outcome.ABSENT, words))
        return
    prepare(folder, checkout, entry.folders, entry.absent)
    try:
        attempt = Attempt(name, partial(entry.make, checkout))
    except Exception as error:
        if os.environ.get("TRACE"):
            raise
        report(Result(name, Setup.PLAIN, Outcome.EAGER, words_of(error)))
        return
    for way, run in zip(
        Setup, (attempt.plain, attempt.optimizer, attempt.backend, attempt.tiles), strict=True
    ):
        if way in ways:
            report(run())


def run_apart(entry: Entry, folder: Path, seconds: int, ways: Sequence[Setup]) -> list[Result]:
    """Ways of an entry in a fork with a limit of processor time, and of ten times that of waiting."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1), os.dup2(quiet, 2)
        run_here(entry.name, folder, lambda result: os.write(writer, line_of(result).encode()), ways)
        os._exit(0)
    os.close(writer)
    found, ended = [], Outcome.CRASHED
    until = time.monotonic() + 10 * seconds
    with os.fdopen(reader) as lines:
        while ready := select.select([lines], [], [], max(0.0, until - time.monotonic()))[0]:
            if not (line := ready[0].readline()):
                break
            found.append(Result(**json.loads(line)))
        else:
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGXCPU):
        ended = Outcome.TIME
    if found and found[0].outcome in (Outcome.EAGER, Outcome.ABSENT):
        return found
    words = (
        f"more than {seconds} s of processor time" if ended is Outcome.TIME else f"ended with status {status}"
    )
    missing = [way for way in ways if way not in {result.way for result in found}]
    return found + [Result(entry.name, way, ended, words) for way in missing[:1]]


def line_of(result: Result) -> str:
    """A result as a line of the file that keeps them."""
    return json.dumps(asdict(result)) + "\n"


def read(path: Path) -> list[Result]:
    """Results, the latest of each way of each entry."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = (Result(**json.loads(line)) for line in lines)
    return list({(result.name, result.way): result for result in found}.values())
