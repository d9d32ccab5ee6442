"""Convolutions in channels-last layout: eager's gradients within rounding, or the step as it is."""

import copy
import logging
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import stowplan
from stowplan import Execution
from stowplan.capture import capture
from stowplan.plan.draft import Exactness
from stowplan.plan.files import plan_file
from stowplan.plan.judge.verify import verify
from stowplan.plan.options import PlanOptions
from stowplan.report.plan import show_plan
from stowplan.run.measure.measure import measure
from stowplan.run.planning.planner import PlannedStep, Subject, step_planner
from stowplan.run.planning.saved import saved_step
from stowplan.techniques.kernels.run import adopt, candidates
from stowplan.techniques.kernels.run.channels_last import in_channels_last
from stowplan.techniques.kernels.run.kernel import Function, Kernel

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]
BUDGET = 3_680_000


class Convolutional(nn.Module):
    """A norm, a pool, a skip and a flattened image between convolutions and a loss."""

    def __init__(self, extra: nn.Module | None = None, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), norm or nn.BatchNorm2d(16)
        self.second, self.extra = nn.Conv2d(16, 16, 3, padding=1), extra or nn.Identity()
        self.head = nn.Linear(16 * 36, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.first(x)))
        y = torch.max_pool2d(self.extra(self.second(y)) + y, 2)
        loss: Tensor = self.head(y.flatten(1)).square().mean()
        return loss


class WithImage(Convolutional):
    """Returns an image beside the loss."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), self.first(x).detach()


class Redirected(nn.Module):
    """Has a gradient of its own: that of another function than it computes."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x.tanh() - x).detach()


def _in_row_major_layout(kernel: Kernel) -> Function:
    def run(inputs: list[Tensor]) -> list[Tensor]:
        made = kernel.by_ops([given.contiguous() for given in inputs])
        looks = zip(made, kernel.result_looks, strict=True)
        return [torch.empty_strided(look.shape, look.stride, dtype=t.dtype).copy_(t) for t, look in looks]

    return run


@pytest.fixture(autouse=True)
def by_ops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Groups run by their ops in row-major layout, and are taken whatever they cost; so is the layout."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(candidates, "cpp_compiler", lambda: "g++")
    monkeypatch.setattr(candidates, "compile_all", lambda _: [])
    monkeypatch.setattr(Kernel, "compile", _in_row_major_layout)
    monkeypatch.setattr(candidates, "_WORTH", 1e9)
    monkeypatch.setattr(adopt, "_ADOPTED", {})


def _subject(model: nn.Module, x: Tensor) -> Subject:
    return Subject(capture(model, (x,)), model, (x,), {})


def _planned(subject: Subject, budget: int) -> PlannedStep:
    """The step with kernels, within the budget, even if eager's own layout is faster."""
    planner = step_planner(subject, PlanOptions(execution=Execution(kernels="compiled")))
    assert planner.compiled is not None
    return PlannedStep(verify(planner.compiled.draft(budget)), planner.compiled.captured)


def _grads(model: nn.Module, run: Callable[[], object]) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss = run()
    assert isinstance(loss, Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_a_plan_in_channels_last_layout_keeps_its_budget_and_its_gradients() -> None:
    torch.manual_seed(0)
    model, x = Convolutional(), torch.randn(32, 3, 12, 12)
    exact, eager = copy.deepcopy(model).double(), copy.deepcopy(model)
    subject = _subject(model, x)
    planned = _planned(subject, BUDGET)
    plan, step = planned.plan, planned.bound_to(model)
    assert len(plan.relaid) == 2
    assert plan.exactness is Exactness.ROUNDING
    show_plan(plan, console := Console(file=StringIO(), width=200), title="")
    assert "2 convolutions run in channels-last layout" in cast(StringIO, console.file).getvalue()

    found = _grads(model, lambda: step(x))
    plain, right = _grads(eager, lambda: eager(x)), _grads(exact, lambda: exact(x.double()))
    assert [gradient.stride() for gradient in found] == [gradient.stride() for gradient in plain]
    one, other, best = (torch.cat([g.reshape(-1).double() for g in grads]) for grads in (found, plain, right))
    slack = 4 * torch.finfo(torch.float32).eps * best.norm()
    assert (one - best).norm() <= 2 * (other - best).norm() + slack
    for name, buffer in eager.named_buffers():
        assert torch.allclose(model.get_buffer(name), buffer, rtol=1e-5), name

    standing = [*model.parameters(), *model.buffers(), x]
    model.zero_grad(set_to_none=True)
    measured = measure(lambda: _grads(model, lambda: step(x)), before=standing).measured_peak_bytes
    assert measured <= BUDGET
    assert measured == pytest.approx(plan.projected_peak_bytes, rel=0.01)
    again = saved_step(plan_file.read(plan_file.write(plan)), subject, BUDGET)
    assert again.draft.steps == plan.steps


def test_without_norms_the_gradients_are_those_of_a_model_in_channels_last_layout() -> None:
    model, x = Convolutional(norm=nn.Identity()), torch.randn(8, 3, 12, 12)
    relaid = cast(Any, copy.deepcopy(model)).to(memory_format=torch.channels_last)
    step = _planned(_subject(model, x), BUDGET).bound_to(model)
    expected = _grads(relaid, lambda: relaid(x.contiguous(memory_format=torch.channels_last)))
    for one, other in zip(_grads(model, lambda: step(x)), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "model",
    [Convolutional(nn.Dropout(0.5)), WithImage(), Convolutional(Redirected())],
    ids=["draws", "returns an image", "differentiates in its own way"],
)
def test_a_step_that_would_not_be_the_same_stays_as_it_is(model: nn.Module) -> None:
    x = torch.randn(2, 3, 12, 12)
    assert in_channels_last(_subject(model, x)) is None
    assert in_channels_last(_subject(Convolutional(), x)) is not None


def test_a_norm_that_is_less_exact_in_that_layout_keeps_the_step_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Kernel, "compile", lambda self: self.by_ops)
    subject = _subject(Convolutional(), torch.randn(32, 3, 12, 12))
    with caplog.at_level(logging.INFO, "stowplan"):
        planned = _planned(subject, BUDGET)
    assert not planned.plan.relaid
    assert any("times as far from float64 as eager's" in record.getMessage() for record in caplog.records)


def test_a_step_that_is_slower_so_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "_WORTH", 0.0)
    fitted = stowplan.fit(
        Convolutional(), (torch.randn(2, 3, 12, 12),), budget="1GiB", execution=Execution(kernels="compiled")
    )
    assert not stowplan.plans_of(fitted)[0].relaid
