"""Neighbours: `fit` within profilers, modes, hooks, switches and tracers of the user's."""

import copy
import cProfile
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import stowplan
from stowplan import Search
from stowplan.errors import BadUse
from stowplan.run.measure.measure import measure

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.net(x)
        return made.square().mean()


class Ops(TorchDispatchMode):
    """Notes the ops that it sees, and whether they are on tensors with data."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def traced() -> Iterator[None]:
    """As under coverage and pdb."""

    def trace(*_: object) -> Any:
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)


@contextmanager
def warnings_as_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


_packed: list[type] = []


def pack(tensor: Tensor) -> Tensor:
    _packed.append(type(tensor))
    return tensor


NEIGHBOURS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "profile": lambda: profile(activities=[ProfilerActivity.CPU]),
    "old profile": torch.autograd.profiler.profile,
    "dispatch mode": Ops,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=True),
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "device": lambda: torch.device("meta"),
    "default device": default_device,
    "default dtype": default_dtype,
    "deterministic": deterministic,
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    "no saved tensors": lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "trace": traced,
    "cProfile": cProfile.Profile,
    "warnings": warnings_as_errors,
}


def numbers_of(model: nn.Module, loss: Tensor) -> list[Tensor | None]:
    if loss.requires_grad:
        torch.autograd.backward(loss)
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def same(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) if a is not None and b is not None else a is b for a, b in pairs)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_fit_and_new_shapes_within_a_neighbour(name: str) -> None:
    eager, rows = Net(), random.randint(4, 4000)
    model = copy.deepcopy(eager)
    first, other = torch.ones(rows, 8), torch.ones(rows + 4001, 8)
    with NEIGHBOURS[name]():
        fitted = stowplan.fit(model, (first,), budget="64MiB", search=Search(moves=50))
    assert same(numbers_of(model, fitted(first)), numbers_of(eager, eager(first)))
    for each in (model, eager):
        each.zero_grad()
    if name == "default dtype":
        return
    with NEIGHBOURS[name]():
        expected = numbers_of(eager, eager(other))
    with NEIGHBOURS[name]():
        found = numbers_of(model, fitted(other))
    assert same(found, expected)


def test_a_profile_keeps_its_events() -> None:
    fitted = stowplan.fit(Net(), (torch.ones(5, 8),), budget="64MiB")
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.ones(3).cos()
        torch.autograd.backward(fitted(torch.ones(random.randint(9, 9999), 8)))
        torch.ones(3).sin()
    names = {event.name for event in profiler.events()}
    assert {"aten::cos", "aten::sin"} <= names


def test_a_dispatch_mode_sees_the_steps_and_not_how_they_were_planned() -> None:
    with Ops() as ops:
        fitted = stowplan.fit(Net(), (torch.ones(7, 8),), budget="64MiB")
        planned = len(ops.seen)
        fitted(torch.ones(7, 8))
    assert not any("addmm" in op for op in ops.seen[:planned])
    assert any("addmm" in op for op in ops.seen[planned:])


def test_hooks_for_saved_tensors_see_no_stand_ins() -> None:
    _packed.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        stowplan.fit(Net(), (torch.ones(7, 8),), budget="64MiB")
    assert {kind.__name__ for kind in _packed} <= {"Tensor", "Parameter"}


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (Functions, "Functions: a planned step calls none of the functions"),
        (lambda: FakeTensorMode(allow_non_fake_inputs=True), "FakeTensorMode: under it nothing is computed"),
        (torch.autograd.graph.allow_mutation_on_saved_tensors, "allow_mutation_on_saved_tensors"),
    ],
)
def test_modes_that_no_planned_step_runs_under_are_refused(
    mode: Callable[[], AbstractContextManager[Any]], words: str
) -> None:
    fitted = stowplan.fit(Net(), (torch.ones(7, 8),), budget="64MiB")
    with mode(), pytest.raises(BadUse, match=words):
        fitted(torch.ones(7, 8))
    fitted(torch.ones(7, 8))


def test_fit_within_a_mode_for_functions_is_refused() -> None:
    with Functions(), pytest.raises(BadUse, match="Functions: a planned step calls none"):
        stowplan.fit(Net(), (torch.ones(7, 8),), budget="64MiB")


def test_another_default_device_is_another_plan(caplog: pytest.LogCaptureFixture) -> None:
    fitted = stowplan.fit(Net(), (torch.ones(7, 8),), budget="64MiB")
    x = torch.ones(7, 8)
    with torch.device("meta"):
        fitted(x)
    assert "torch.get_default_device() changed" in caplog.text


def test_measuring_within_a_profile_is_refused() -> None:
    with profile(activities=[ProfilerActivity.CPU]), pytest.raises(BadUse, match="a profiler is running"):
        measure(lambda: torch.ones(3))
