"""Every road to a plan ends in `verify`: a draft that computes another step than it says gets no further."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stowplan
from stowplan import Execution, Search, api
from stowplan.errors import BadInput, IllegalPlan
from stowplan.plan.draft import Draft
from stowplan.plan.files import plan_file
from stowplan.plan.judge.simulate import Simulation
from stowplan.plan.options import PlanOptions
from stowplan.run.backend.compile import backend
from stowplan.run.largest import Sizes
from stowplan.run.planning.plan_cache import PlanCache
from stowplan.run.project import Projection
from stowplan.techniques.held_blocks.run import plugin as holding
from tests.run.test_saved_plans import tiled
from tests.support.plans import note_verified, spoil_drafts, without_its_last_op

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

TIGHT, WITH_A_COPY, AMPLE = 350_000, 600_000, 2**30
TARGET = "step_of_the_road:step"
_STEP = """
import torch
from tests.run.test_every_road_to_a_plan import Chain

def step(batch=512):
    return Chain(), (torch.randn(batch, 32),)
"""


class Chain(nn.Module):
    """Layers, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh())))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        return loss


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache and a module of its own for each test."""
    torch.manual_seed(0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)  # which deterministic trainers set and leave
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "step_of_the_road.py").write_text(_STEP)


def _rows(batch: int = 512) -> Tensor:
    return torch.randn(batch, 32)


def _fit(budget: Any = TIGHT, **how: Any) -> nn.Module:
    how = {"allow": ("recompute",), "search": Search(moves=5), **how}
    return stowplan.fit(Chain(), (_rows(),), budget=budget, **how)


def _fit_with_an_optimizer() -> nn.Module:
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return stowplan.fit(model, (_rows(),), budget="1MB", optimizer=optimizer, search=Search(moves=5))


def _fit_in_a_segment() -> nn.Module:
    """As on a card: the step is planned on the CPU, and stops before it would run there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holding, "device_of", lambda _: torch.device("cuda"))
        return _fit("1MB", execution=Execution(held_blocks=True))


def _project() -> Projection:
    with torch.device("meta"):
        model, x = Chain(), _rows()
    return stowplan.project(model, (x,), device="a100-80gb", budget="64MiB", allow=("recompute",))


def _compile() -> None:
    torch._dynamo.reset()
    options: dict[str, Any] = {"budget": AMPLE, "moves": 5}
    torch.compile(Chain(), backend=backend, options=options)(_rows()).backward()


ROADS: dict[str, Callable[[], object]] = {
    "fit": _fit,
    "fit, ample": lambda: _fit(AMPLE),
    "tiles": tiled,
    "iteration": _fit_with_an_optimizer,
    "arena": lambda: _fit(WITH_A_COPY, execution=Execution(arena=True)),
    "devices": lambda: _fit({"cpu": WITH_A_COPY}),
    "segment": _fit_in_a_segment,
    "shapes": lambda: _fit(AMPLE, shapes={"x": {0: (1, 512)}}),
    "project": _project,
    "backend": _compile,
    "plan of a function": lambda: api.plan_for(TARGET, TIGHT, allow=("recompute",)),
    "planner of a function": lambda: api.planner_for(TARGET, allow=("recompute",)).plan(TIGHT),
    "planner for an allocator": lambda: api.plan_for_allocator(
        api.planner_for(TARGET, allow=("recompute",)), 4 * 2**20, "cuda"
    ),
    "fit-largest": lambda: Sizes(TARGET, "batch", 512, 1, PlanOptions(search=Search(moves=5))).attempt(
        ("recompute",), TIGHT, 0
    ),
    "check": lambda: api.check(TARGET, TIGHT, allow=("recompute",)),
}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Simulation]:
    return note_verified(monkeypatch)


@pytest.mark.parametrize("road", ROADS)
def test_a_plan_is_verified_once(road: str, seen: list[Simulation]) -> None:
    ROADS[road]()
    assert len(seen) == 1


@pytest.mark.parametrize("road", ROADS)
def test_an_illegal_draft_is_refused(
    road: str, seen: list[Simulation], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_drafts(monkeypatch)
    with pytest.raises(IllegalPlan, match="never runs"):
        ROADS[road]()
    assert not seen


def test_a_plan_that_is_carried_to_another_size_is_verified_once(
    seen: list[Simulation], monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted = _fit()
    fitted(_rows(500))
    assert len(seen) == 2
    assert len(stowplan.plans_of(fitted)) == 2
    monkeypatch.setattr(PlanCache, "step_for", None)  # nothing is searched
    spoil_drafts(monkeypatch)
    with pytest.raises(IllegalPlan, match="never runs"):
        fitted(_rows(490))
    assert len(seen) == 2


def _written(tmp_path: Path, draft: Draft) -> Path:
    path = tmp_path / "illegal.plan.json"
    path.write_text(plan_file.write(without_its_last_op(draft)))
    return path


def test_an_illegal_plan_in_a_file_is_refused_where_it_is_read(tmp_path: Path) -> None:
    (plan,) = stowplan.plans_of(_fit())
    path = _written(tmp_path, plan.draft())
    for reads in (lambda: stowplan.load_plan(path), lambda: _fit(plan=path)):
        with pytest.raises(BadInput, match=r"not a legal plan for its graph: op .* never runs"):
            reads()


def test_an_illegal_plan_in_the_cache_is_made_anew(tmp_path: Path, seen: list[Simulation]) -> None:
    (plan,) = stowplan.plans_of(_fit())
    (kept,) = (tmp_path / "stowplan" / "plans").iterdir()
    kept.write_text(_written(tmp_path, plan.draft()).read_text())
    seen.clear()
    assert stowplan.plans_of(_fit()) == (plan,)
    assert len(seen) == 1
