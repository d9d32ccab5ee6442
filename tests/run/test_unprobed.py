"""A step that fits as it is: no op is timed, and the workspace of each kernel is known or probed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import stowplan
from stowplan.capture import capture
from stowplan.plan.pricing import Basis
from stowplan.run.cost.probe import call_signature, probe
from stowplan.run.measure.measure import measure
from stowplan.run.planning.unprobed import KNOWN, known_workspace
from tests.support.models import images

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _every_known_op(x: Tensor, weight: Tensor) -> Tensor:
    """Runs each op whose workspace is known, in one layout or another."""
    tokens = torch.arange(len(x)) % len(weight)
    y = nn.functional.embedding(tokens, weight) + x * 2 - x.t() * x / x.exp().add(1)
    for function in (torch.relu, torch.sigmoid, torch.tanh, nn.functional.gelu, nn.functional.silu):
        y = y + function(y) * 0.5
    y = (y / 3).square() + torch.addmm(y[0], y, x) + y.t() @ x + (y.view(4, -1, 64) @ x.view(4, 64, -1)).sum()
    y = y.softmax(1) - (-y) + y.t().clone() + y.mean()
    return nn.functional.nll_loss(y.log_softmax(-1), tokens % y.shape[1])


class Calls(nn.Module):
    """A function of the input and a parameter."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], side: int = 64) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(images(side, side))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


@pytest.mark.slow
def test_kernels_take_no_more_workspace_than_is_known_of_them() -> None:
    captured = capture(Calls(_every_known_op), (images(64, 64).requires_grad_(),))
    found = probe(captured, repeats=0, cache=None).workspace_bytes
    met = set[object]()
    for op in captured.graph.ops:
        signature = call_signature(captured.graph, captured.program.calls[op.id])
        known = known_workspace(signature)
        if known is not None:
            met.add(signature.call.target)
            assert found[op.id] <= known, signature.text
    assert met == set(KNOWN)


def test_nothing_is_known_of_casts_gaps_and_other_kernels() -> None:
    def step(x: Tensor, weight: Tensor) -> Tensor:
        return (x.double() * weight).sum() + (x[:, ::2] @ weight[:32]).cumsum(0).sum()

    captured = capture(Calls(step), (images(64, 64),))
    calls = [call_signature(captured.graph, call) for call in captured.program.calls.values()]
    for began in ("aten.mul.Tensor(%0, %1) of float64", "aten.mm.default(%0, %1) of float32", "aten.cumsum"):
        found = next(call for call in calls if call.text.startswith(began))
        assert known_workspace(found) is None, found.text


def test_a_step_that_fits_is_not_timed_and_stays_within_its_projection(tmp_path: Path) -> None:
    model, x = (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 4)),
        images(2, 3, 14, 14),
    )
    fitted = stowplan.fit(model, (x,), budget="1GiB", loss=torch.sum)
    plan = stowplan.plans_of(fitted)[0]
    assert plan.pricing.basis is Basis.ROOFLINE
    assert plan.time_ratio == 1.0
    assert not list(tmp_path.rglob("probes/*.json"))
    measured = measure(lambda: fitted(x).backward(), before=[x, *model.parameters()])
    assert 0.95 * plan.projected_peak_bytes <= measured.measured_peak_bytes <= plan.projected_peak_bytes


def test_workspace_decides_whether_a_step_fits() -> None:
    model, x = nn.Conv2d(16, 16, 3), images(1, 16, 24, 24)  # the image is unfolded, nine times as large
    whole = stowplan.plans_of(stowplan.fit(model, (x,), budget="1GiB", loss=torch.sum))[0]
    bare = capture(model, (x,), loss=torch.sum).eager.peak_bytes()
    assert whole.projected_peak_bytes > bare
    with pytest.raises(stowplan.BudgetTooSmall):
        stowplan.fit(model, (x,), budget=bare, loss=torch.sum, allow=("recompute",))
