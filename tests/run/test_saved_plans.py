"""Plans that come back: from the cache at once, from a file for the same step, and for no other."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import stowplan
from stowplan import Search
from stowplan.errors import IllegalPlan
from stowplan.plan.draft import Exactness
from stowplan.plan.files import plan_file
from stowplan.plan.plan import Plan
from stowplan.run.cost.machine import free_bytes
from stowplan.run.fit import MARGIN, automatic_budget

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.usefixtures("one_thread")]


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
        model or Chain(),
        (torch.randn(128, 16),),
        budget=budget,
        allow=["recompute"],
        search=Search(moves=50),
        plan=plan,
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


def test_a_damaged_plan_is_planned_a_second_time(folder: Path) -> None:
    (first,) = stowplan.plans_of(fitted())
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    (again,) = stowplan.plans_of(fitted())
    assert again.steps == first.steps
    assert plan_file.read(path.read_text()).steps == again.steps


def test_a_saved_plan_runs(tmp_path: Path) -> None:
    (plan,) = stowplan.plans_of(fitted())
    (tmp_path / "plan.json").write_text(plan_file.write(plan))
    model = fitted(plan=stowplan.load_plan(tmp_path / "plan.json"))
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


class Wide(nn.Module):
    """A first stage that holds nearly all: below half of it there are only tiles."""

    def __init__(self, activation: type[nn.Module] = nn.ReLU, head: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        stage = (m for n in (1, 8, 8) for m in (nn.Conv2d(n, 8, 3, padding=1), activation()))
        self.layers = nn.Sequential(*stage, nn.MaxPool2d(4), nn.Dropout(), nn.Conv2d(8, 2, 1), head())

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        return loss


IN_TILES = 600_000


def tiled(model: nn.Module | None = None, plan: Plan | None = None, side: int = 96) -> nn.Module:
    torch.manual_seed(0)
    return stowplan.fit(
        model or Wide(),
        (torch.randn(1, 1, side, side),),
        budget=IN_TILES,
        plan=plan,
        search=Search(moves=50),
        allow=("recompute", "tile"),
    )


def step_of(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    loss = model(torch.randn(1, 1, 96, 96))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.fixture(scope="module")
def plan_in_tiles(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        (plan,) = stowplan.plans_of(tiled())
    assert plan.exactness is Exactness.ROUNDING
    return plan


def test_a_plan_with_tiles_comes_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the cache, without a search, and from a file; the sweeps are those of the first time."""
    first = tiled()
    (plan,) = stowplan.plans_of(first)
    (path,) = folder.iterdir()
    monkeypatch.setattr("stowplan.run.planning.plan_cache.draft_step", None)
    for again in (tiled(), tiled(plan=stowplan.load_plan(path))):
        assert stowplan.plans_of(again) == (plan,)
        again.load_state_dict(first.state_dict())
        first.zero_grad()
        for one, other in zip(step_of(first), step_of(again), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (Wide(activation=nn.Tanh), r"'relu' \(aten\.relu\.default\) .* is in the plan alone"),
        (Wide(head=nn.Sigmoid), r"op \d+: .*aten\.sigmoid\.default"),
        (Chain(), r"'convolution' .* is in the plan alone"),
    ],
)
def test_tiles_are_refused_on_another_model(plan_in_tiles: Plan, model: nn.Module, told: str) -> None:
    x = torch.randn(16, 16) if isinstance(model, Chain) else torch.randn(1, 1, 96, 96)
    with pytest.raises(IllegalPlan, match=told):
        stowplan.fit(model, (x,), budget=IN_TILES, plan=plan_in_tiles)


def test_tiles_are_refused_on_another_size(plan_in_tiles: Plan) -> None:
    with pytest.raises(IllegalPlan, match=r"op 1: .*1x1x96x96 in the plan and .*1x1x48x48 in the step"):
        tiled(plan=plan_in_tiles, side=48)
