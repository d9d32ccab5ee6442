"""Compiled kernels end to end: compiled by children, run within the budget, near to eager's gradients."""

import copy
import logging
from math import inf
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import Tensor, nn

import stowplan
from stowplan import Execution
from stowplan.capture import capture
from stowplan.errors import BadUse
from stowplan.ops.effects import FUSED
from stowplan.plan.draft import Exactness
from stowplan.plan.files import plan_file
from stowplan.run.backend.compile import plans_for
from stowplan.run.measure.measure import measure
from stowplan.techniques.kernels.run import candidates, compiling
from stowplan.techniques.kernels.run.candidates import groups_in_step, kernels_of
from stowplan.techniques.kernels.run.kernel import Kernel
from stowplan.torch_private import cpp_compiler

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]
needs_compiler = pytest.mark.skipif(
    not cpp_compiler(), reason="inductor needs a C++ compiler, and there is none"
)

BUDGET = 6_000_000
WITH_KERNELS = 4_400_000  # bytes, in which there is no plan without compiled kernels


class Activated(nn.Module):
    """Two products with a chain of pointwise ops between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        loss: Tensor = self.second(torch.tanh(y) * torch.sigmoid(y) + y.square() * 0.5).square().mean()
        return loss


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@needs_compiler
@pytest.mark.slow
def test_a_step_with_compiled_kernels_keeps_its_budget_and_its_gradients(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(compiling, "MOST_SECONDS", 1e6)  # however busy the machine is
    monkeypatch.setattr(candidates, "_WORTH", inf)
    model, x = Activated(), torch.randn(2048, 64)
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    with caplog.at_level(logging.INFO, "stowplan"):
        fitted = stowplan.fit(model, (x,), budget=WITH_KERNELS, execution=Execution(kernels="compiled"))
    assert any("compiling" in record.getMessage() for record in caplog.records)
    (plan,) = stowplan.plans_of(fitted)
    fused = [op for op in plan.graph.ops if op.type == FUSED]
    assert fused
    bitwise = all(op.attributes["exact"] for op in fused)
    assert plan.exactness is (Exactness.BITWISE if bitwise else Exactness.ROUNDING)

    fitted(x).backward()
    eager(x).backward()
    exact(x.double()).backward()
    for found, plain, right in zip(model.parameters(), eager.parameters(), exact.parameters(), strict=True):
        assert found.grad is not None
        assert plain.grad is not None
        assert right.grad is not None
        error, own = (found.grad - right.grad).abs().max(), (plain.grad - right.grad).abs().max()
        assert error <= 2 * own + 4 * torch.finfo(torch.float32).eps * right.grad.abs().max()

    model.zero_grad(set_to_none=True)
    standing = [*model.parameters(), x]
    measured = measure(lambda: fitted(x).backward(), before=standing).measured_peak_bytes
    assert measured <= WITH_KERNELS
    assert measured == pytest.approx(plan.projected_peak_bytes, rel=0.01)

    # From the cache and from a file: nothing is compiled a second time, not even by this process.
    monkeypatch.setattr(compiling, "_Child", None)
    plan.save(tmp_path / "saved.plan.json")
    again = stowplan.fit(model, (x,), budget=WITH_KERNELS, execution=Execution(kernels="compiled"))
    saved = plan_file.read((tmp_path / "saved.plan.json").read_text())
    for other in (again, stowplan.fit(model, (x,), budget=WITH_KERNELS, plan=saved)):
        assert stowplan.plans_of(other)[0].steps == plan.steps
        model.zero_grad(set_to_none=True)
        other(x).backward()


def test_kernels_that_are_not_compiled_leave_the_step_eager(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "cpp_compiler", lambda: "g++")
    monkeypatch.setattr(candidates, "compile_all", lambda _: [])
    monkeypatch.setattr(Kernel, "compile", lambda _: 1 / 0)
    model, x = Activated(), torch.randn(128, 64)
    with caplog.at_level(logging.INFO, "stowplan"):
        fitted = stowplan.fit(model, (x,), budget=BUDGET, execution=Execution(kernels="compiled"))
    assert any("ZeroDivisionError" in record.getMessage() for record in caplog.records)
    (plan,) = stowplan.plans_of(fitted)
    assert plan.exactness is Exactness.BITWISE
    assert not any(op.type == FUSED for op in plan.graph.ops)


def test_a_slower_kernel_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager's own kernels in place of compiled ones are as fast as eager, so no group is worth it."""
    monkeypatch.setattr(candidates, "cpp_compiler", lambda: "g++")
    monkeypatch.setattr(candidates, "compile_all", lambda _: [])
    monkeypatch.setattr(Kernel, "compile", lambda self: self.by_ops)
    monkeypatch.setattr(candidates, "_WORTH", 0.0)
    fitted = stowplan.fit(
        Activated(), (torch.randn(128, 64),), budget=BUDGET, execution=Execution(kernels="compiled")
    )
    assert not any(op.type == FUSED for op in stowplan.plans_of(fitted)[0].graph.ops)


def test_kernels_for_which_there_is_no_time_stay_eager(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child is ended at the limit, and this process does not compile in its place."""
    monkeypatch.setattr(candidates, "cpp_compiler", lambda: "g++")
    monkeypatch.setattr(compiling, "MOST_SECONDS", 0.0)
    monkeypatch.setattr(Kernel, "compile", None)
    with caplog.at_level(logging.WARNING, "stowplan"):
        fitted = stowplan.fit(
            Activated(), (torch.randn(1024, 64),), budget=BUDGET, execution=Execution(kernels="compiled")
        )
    assert any("time for compiling is over" in record.getMessage() for record in caplog.records)
    assert not stowplan.plans_of(fitted)[0].kernels


def test_children_get_kernels_as_they_are() -> None:
    captured = capture(Activated(), (torch.randn(16, 64),))
    for kernel in kernels_of(captured, groups_in_step(captured)).values():
        content = msgspec.msgpack.decode(msgspec.msgpack.encode(compiling.packed(kernel)))
        assert compiling.unpacked(content).name == kernel.name


def test_without_a_compiler_the_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "cpp_compiler", lambda: "")
    with pytest.raises(BadUse, match=r"C\+\+ compiler"):
        stowplan.fit(
            Activated(), (torch.randn(16, 64),), budget=BUDGET, execution=Execution(kernels="compiled")
        )


def test_unknown_kernels_are_refused() -> None:
    with pytest.raises(BadUse, match="eager, compiled"):
        stowplan.fit(
            Activated(), (torch.randn(16, 64),), budget=BUDGET, execution=Execution(kernels=cast(Any, "fast"))
        )


@pytest.fixture
def eager_for_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager's own kernels stand for compiled ones, so that a step with groups keeps its bits; it is taken."""
    monkeypatch.setattr("stowplan.plan.select._faster", lambda one, other: one or other)
    monkeypatch.setattr(candidates, "cpp_compiler", lambda: "g++")
    monkeypatch.setattr(candidates, "compile_all", lambda _: [])
    monkeypatch.setattr(Kernel, "compile", lambda self: self.by_ops)
    monkeypatch.setattr(candidates, "_WORTH", inf)


@pytest.mark.usefixtures("eager_for_compiled")
def test_the_optimizer_updates_in_a_step_with_groups() -> None:
    model, x = Activated(), torch.randn(320, 64)
    eager = copy.deepcopy(model)
    own, plain = (torch.optim.AdamW(each.parameters()) for each in (model, eager))
    fitted = stowplan.fit(model, (x,), budget=BUDGET, execution=Execution(kernels="compiled"), optimizer=own)
    assert stowplan.plans_of(fitted)[0].kernels
    for _ in range(2):
        for step, optimizer in ((fitted, own), (eager, plain)):
            step(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, model.parameters(), eager.parameters()))


@pytest.mark.usefixtures("eager_for_compiled")
def test_the_backend_takes_kernels() -> None:
    model, x = Activated(), torch.randn(256, 64)
    eager = copy.deepcopy(model)
    options: dict[str, Any] = {"budget": BUDGET, "kernels": "compiled"}
    compiled = torch.compile(model, backend="stowplan", options=options)
    compiled(x).backward()
    eager(x).backward()
    assert any(plan.kernels for plan in plans_for(options))
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
