"""A plan slower than twice eager's is used only if somebody asks for it; the refusal names every way out."""

import json
import re
from typing import Any

import pytest
import torch
from torch import nn

import stowplan
from stowplan import Search
from stowplan.cli.main import main
from stowplan.errors import BudgetTooSmall, PlanTooSlow
from stowplan.plan.plan import Plan
from stowplan.run.fit import fit, plans_of
from stowplan.run.largest import largest_of
from stowplan.run.shape_costs import scan
from tests.support.models import small_pictures

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

STEP = "tests.support.models:small_pictures"


def planned(budget: int, **settings: Any) -> Plan:
    return plans_of(fit(*small_pictures(), budget=budget, **{"search": Search(moves=20), **settings}))[0]


@pytest.fixture(scope="module")
def tight() -> int:
    """Below what recomputation reaches: only tiles fit."""
    model, args = small_pictures()
    with pytest.raises(BudgetTooSmall) as refusal:
        fit(model, args, budget=1, search=Search(moves=20), allow=("recompute",))
    return int(0.8 * refusal.value.minimum_bytes)


@pytest.mark.slow
def test_a_slow_plan_is_refused_with_its_time_and_every_way_out(tight: int) -> None:
    with pytest.raises(PlanTooSlow) as found:
        planned(tight)
    refusal = found.value
    assert isinstance(refusal, BudgetTooSmall)
    assert refusal.time_ratio > 2
    assert f"by tiles, takes {refusal.time_ratio:.1f} times eager's time" in str(refusal)
    assert f"{refusal.minimum_bytes:,} bytes is the smallest known budget" in str(refusal)
    assert 'give fit allow=("recompute", "tile"), or a command --allow recompute,tile' in str(refusal)
    fast = planned(refusal.minimum_bytes)  # the budget that it names
    assert fast.time_ratio <= 2
    assert tight < fast.projected_peak_bytes <= refusal.minimum_bytes < fast.plain_peak_bytes
    slow = planned(tight, allow=("recompute", "tile"))  # the argument that it names
    assert slow.time_ratio == pytest.approx(refusal.time_ratio)


@pytest.mark.parametrize(
    "asked",
    [
        {"search": Search(prefer="time", moves=20)},
        {"search": Search(prefer="exactness", moves=20)},
        {"allow": ["tile", "recompute"]},
    ],
)
def test_who_prefers_or_allows_gets_a_slow_plan(asked: dict[str, Any], tight: int) -> None:
    assert planned(tight, **asked).time_ratio > 2


@pytest.mark.slow
def test_a_saved_plan_is_asked_for(tight: int) -> None:
    slow = planned(tight, allow=("recompute", "tile"))
    assert planned(tight, plan=slow).time_ratio == slow.time_ratio


@pytest.mark.slow
@pytest.mark.parametrize("rows", [4, 64])
def test_a_refusal_of_a_small_step_that_draws_names_a_budget_that_works(rows: int) -> None:
    net, args = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1)), (torch.ones(rows, 8),)
    with pytest.raises(BudgetTooSmall) as refusal:
        fit(net, args, budget=1, loss=torch.Tensor.sum)
    assert refusal.value.minimum_bytes < 1 << 14
    fit(net, args, budget=refusal.value.minimum_bytes, loss=torch.Tensor.sum)


@pytest.mark.slow
def test_a_reserve_is_part_of_both_budgets(tight: int) -> None:
    with pytest.raises(PlanTooSlow, match="with 1,000 bytes for the reserve") as found:
        planned(tight + 1000, reserve=1000)
    assert found.value.allowed_bytes == tight + 1000
    assert planned(found.value.minimum_bytes, reserve=1000).time_ratio <= 2


@pytest.mark.slow
def test_too_small_a_budget_names_one_whose_plan_is_not_slow() -> None:
    """The smallest plan of all is slow here."""
    model, args = small_pictures()
    with pytest.raises(BudgetTooSmall) as found:
        fit(model, args, budget=60_000, search=Search(moves=20))
    assert (
        plans_of(fit(model, args, budget=found.value.minimum_bytes, search=Search(moves=20)))[0].time_ratio
        <= 2
    )


@pytest.mark.slow
def test_a_call_in_training_is_refused_too_and_scanned(tight: int) -> None:
    model, args = small_pictures(2)
    fitted: Any = fit(model, args, budget=tight, search=Search(moves=20))
    with pytest.raises(PlanTooSlow, match="times eager's time"):
        fitted(*small_pictures(4)[1])
    (row,) = scan([small_pictures(4)[1]], fitted).refused
    assert re.fullmatch(r"refused at \d+\.\d x", row.how)


@pytest.mark.slow
def test_commands_refuse_it_unless_asked(tight: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", STEP, "--budget", str(tight), "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["time_ratio"] > 2
    assert "or a command --allow recompute,tile" in err
    assert main(["plan", STEP, "--budget", str(tight), "--allow", "recompute,tile"]) == 0
    assert "`fit` uses such a plan only if allow= or prefer= is given" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.slow
def test_a_size_whose_plan_is_slow_does_not_fit(tight: int) -> None:
    how: Any = {"first": 2, "most": 4, "search": Search(moves=20)}
    *_, unasked = largest_of(STEP, tight, **how)
    *_, asked = largest_of(STEP, tight, allow=("recompute", "tile"), **how)
    assert unasked.fit is not None
    assert asked.fit is not None
    assert unasked.fit.projected_seconds <= 2 * unasked.fit.plain_seconds
    assert unasked.fit.size < asked.fit.size


def test_the_error_is_public() -> None:
    assert stowplan.PlanTooSlow is PlanTooSlow
