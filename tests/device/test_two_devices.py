"""A model on two devices: a budget for each, held as projected, with eager's bits."""

import copy

import pytest
import torch
from torch import Tensor, nn

import stowplan
from stowplan import Execution, Search
from stowplan.errors import BadUse, BudgetTooSmall
from stowplan.plan.plan import Plan
from stowplan.plan.steps import RecomputeOp, Store
from stowplan.run.fit import automatic_budget
from stowplan.run.measure.measure import measure
from tests.support import device as stand_in

_PLACES = ("standin:0", "standin:1")


class Halves(nn.Module):
    """Layers on one device, then others on the next. The second are twice as wide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.halves = nn.ModuleList(
            nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())))
            for width in (32, 64)
        )
        for half, place in zip(self.halves, _PLACES, strict=True):
            half.to(place)

    def forward(self, rows: Tensor) -> Tensor:
        moved: Tensor = self.halves[0](rows).to(_PLACES[1])
        wide: Tensor = self.halves[1](torch.cat([moved, moved], 1))
        return wide.sum()


@pytest.fixture
def rows(device: torch.device) -> Tensor:
    return torch.randn(128, 32, device=device)


def _gradients(model: nn.Module, rows: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.autograd.backward(model(rows))
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _peaks(model: nn.Module, rows: Tensor) -> dict[str, int]:
    """The measured peak of each device, in a run for each."""
    found = {}
    for place in _PLACES:
        model.zero_grad()
        there = [*model.parameters(), rows]
        run = measure(lambda: _gradients(model, rows), device=torch.device(place), before=there)
        found[place] = run.measured_peak_bytes
        del run
    return found


def _fitted(rows: Tensor, budget: object, allow: list[str]) -> tuple[nn.Module, nn.Module, Plan]:
    eager = Halves()
    how: dict[str, object] = {"budget": budget, "allow": allow, "search": Search(moves=2, gap=0.5)}
    fitted = stowplan.fit(copy.deepcopy(eager), (rows,), **how)  # type: ignore[arg-type]
    return eager, fitted, stowplan.plans_of(fitted)[0]


@pytest.mark.parametrize(
    ("allow", "kind", "second"), [("recompute", RecomputeOp, 255_000), ("offload", Store, 240_000)]
)
def test_each_device_keeps_its_own_budget(allow: str, kind: type, second: int, rows: Tensor) -> None:
    budget = {_PLACES[0]: 200_000, _PLACES[1]: second}
    eager, fitted, plan = _fitted(rows, budget, [allow])
    before = _peaks(eager, rows)
    assert before[_PLACES[1]] > second, "eager does not fit the second device"
    assert any(isinstance(step, kind) for step in plan.steps)
    stand_in.delay(200)
    pairs = zip(_gradients(fitted, rows), _gradients(eager, rows), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert _peaks(fitted, rows) == plan.peaks_by_device
    assert all(plan.peaks_by_device[place] <= budget[place] for place in _PLACES)


def test_a_sum_that_fits_is_refused_where_one_device_does_not() -> None:
    rows = torch.randn(128, 32, device=_PLACES[0])
    _, _, plan = _fitted(rows, "1MiB", ["recompute"])
    there = plan.peaks_by_device
    with pytest.raises(BudgetTooSmall, match=r"allowed on standin:1, but .* there"):
        _fitted(
            rows, {_PLACES[0]: 10 * there[_PLACES[0]], _PLACES[1]: there[_PLACES[1]] * 2 // 3}, ["recompute"]
        )
    with pytest.raises(BadUse, match="tensors on standin:1, and the budget is for standin:0"):
        _fitted(rows, {_PLACES[0]: "1GiB"}, ["recompute"])
    with pytest.raises(BadUse, match="write 'standin:0'"):
        _fitted(rows, {"standin": "1GiB"}, ["recompute"])


def test_an_automatic_budget_is_one_for_each_device(rows: Tensor) -> None:
    model = Halves()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    stand_in.set_capacity(100 * 2**20, 0)
    stand_in.set_capacity(40 * 2**20, 1)
    found = automatic_budget(model, (rows,))
    assert isinstance(found, dict)
    assert list(found) == list(_PLACES)
    assert found[_PLACES[1]] < 40 * 2**20 < found[_PLACES[0]] < 100 * 2**20
    with pytest.raises(BadUse, match='"auto" also is'):
        stowplan.fit(model, (rows,), budget="auto", execution=Execution(arena=True))
