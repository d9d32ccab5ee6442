"""Plans that come back: from the cache at once, from a file for the same step, and for no other."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import stowplan
from stowplan.errors import IllegalPlan
from stowplan.plan import file as plan_file
from stowplan.plan.plan import Plan
from stowplan.run.auto_budget import MARGIN, automatic_budget
from stowplan.run.machine import free_bytes
from stowplan.run.plan_cache import PlanCache

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]


class Chain(nn.Module):
    """Layers of a width, and a loss."""

    def __init__(self, width: int = 16, activation: type[nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(width, width), activation())))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        return loss


BUDGET = 50_000


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "stowplan" / "plans"


def fitted(model: nn.Module | None = None, budget: int | str = BUDGET, plan: Plan | None = None) -> nn.Module:
    torch.manual_seed(0)
    return stowplan.fit(
        model or Chain(), (torch.randn(128, 16),), budget=budget, allow=["recompute"], moves=50, plan=plan
    )


def test_what_is_kept_is_taken(folder: Path) -> None:
    """Shown by another legal plan in its place: nothing is searched for where one is found."""
    (roomy,) = stowplan.plans_of(fitted(budget=10**6))
    (path,) = folder.iterdir()
    (tight,) = stowplan.plans_of(fitted())
    assert tight.steps != roomy.steps
    path.write_text(plan_file.write(tight))
    assert stowplan.plans_of(fitted(budget=10**6)) == (tight,)


def test_another_step_or_budget_is_planned_anew(folder: Path) -> None:
    fitted()
    fitted(budget=BUDGET + 1)
    fitted(Chain(activation=nn.Sigmoid))
    assert len(list(folder.iterdir())) == 3


def test_a_damaged_plan_is_made_again(folder: Path) -> None:
    (first,) = stowplan.plans_of(fitted())
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    (again,) = stowplan.plans_of(fitted())
    assert again.steps == first.steps
    assert PlanCache(folder).read(path.name.partition(".")[0], first.graph) == again


def test_a_saved_plan_runs(tmp_path: Path) -> None:
    (plan,) = stowplan.plans_of(fitted())
    (tmp_path / "plan.json").write_text(plan_file.write(plan))
    model = fitted(plan=stowplan.read_plan(tmp_path / "plan.json"))
    assert stowplan.plans_of(model) == (plan,)
    x = torch.randn(128, 16)
    plain = Chain()
    plain.load_state_dict(model.state_dict())
    model(x).backward()
    plain(x).backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (
            Chain(activation=nn.Sigmoid),
            r"op \d+: .*aten\.tanh\.default in the plan and aten\.sigmoid\.default",
        ),
        (nn.Sequential(Chain(), nn.Identity()), r"op 1: "),
    ],
)
def test_a_saved_plan_is_refused_on_another_model(model: nn.Module, told: str) -> None:
    (plan,) = stowplan.plans_of(fitted())
    with pytest.raises(IllegalPlan, match=told):
        fitted(model, plan=plan)


def test_a_saved_plan_is_refused_on_another_size_or_budget() -> None:
    (plan,) = stowplan.plans_of(fitted())
    with pytest.raises(IllegalPlan, match=r"op \d+: .*128x16 in the plan and .*64x16 in the step"):
        stowplan.fit(Chain(), (torch.randn(64, 16),), budget=BUDGET, plan=plan)
    with pytest.raises(IllegalPlan, match="are allowed"):
        fitted(budget=1000, plan=plan)


def test_the_automatic_budget_leaves_a_margin() -> None:
    model, x = Chain(), torch.randn(128, 16)
    free = free_bytes(torch.device("cpu"))
    assert automatic_budget(model, (x, x)) == pytest.approx(free * (1 - MARGIN), rel=0.05)
    (plan,) = stowplan.plans_of(fitted(budget="auto"))
    assert 0 < plan.allowed_bytes < free
    assert plan.time_ratio <= 1.0
