"""Answers that need no search: the step fits as it is, or no plan can fit."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn

import stowplan
from stowplan import Search
from stowplan.errors import BudgetTooSmall
from stowplan.plan import frontier
from stowplan.plan.draft import Draft
from stowplan.plan.options import PlanOptions
from stowplan.plan.planner import baseline_peak_of
from stowplan.plan.select import Baseline, CandidateGroup, Selector, Tradeoff, planner_of
from tests.support.steps import random_step, uneven_prices

pytestmark = pytest.mark.torch
_OPTIONS = PlanOptions(("recompute",), search=Search(moves=200))


def _model() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(16, 1), nn.Flatten(0)), (torch.randn(64, 16),)


def _no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def searched(*_: object, **__: object) -> None:
        raise AssertionError("a search was begun")

    monkeypatch.setattr(frontier._Search, "start_at", searched)
    monkeypatch.setattr(frontier._Search, "sweep", searched)


@pytest.mark.slow
def test_a_step_that_fits_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_step(3, layers=12)
    prices = uneven_prices(graph, 3)
    searched = planner_of(graph, prices, _OPTIONS)
    tight = searched.plan(searched.minimum_bytes)
    _no_search(monkeypatch)
    fresh = planner_of(graph, prices, _OPTIONS)
    plan = fresh.plan(baseline_peak_of(graph, prices))
    assert plan.projected_seconds == plan.plain_seconds == plan.bound_seconds
    assert plan.minimum_bytes is None
    assert tight.minimum_bytes is not None
    with pytest.raises(AssertionError, match="a search was begun"):
        fresh.plan(tight.minimum_bytes)


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.mean(self.layers(x).square())


@pytest.mark.parametrize("is_tight", [False, True])
@pytest.mark.slow
def test_a_plan_far_slower_than_eager_is_a_warning_to_who_asked(
    is_tight: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = _Convolutions(), torch.randn(1, 4, 24, 24)
    budget = 10**9
    if is_tight:
        with pytest.raises(BudgetTooSmall) as refused:
            stowplan.fit(model, (x,), budget=1, search=Search(moves=20), allow=("recompute", "tile"))
        budget = refused.value.minimum_bytes
    caplog.set_level(logging.INFO, "stowplan")
    caplog.clear()
    (plan,) = stowplan.plans_of(
        stowplan.fit(model, (x,), budget=budget, search=Search(moves=20), allow=("recompute", "tile"))
    )
    (record,) = [record for record in caplog.records if "planned _Convolutions" in record.getMessage()]
    assert (plan.time_ratio > 3) is is_tight
    assert record.levelno == (logging.WARNING if is_tight else logging.INFO)
    assert ("a larger budget costs less time" in record.getMessage()) is is_tight


@pytest.mark.slow
def test_a_hopeless_budget_is_refused_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args = _model()
    with monkeypatch.context() as patched:
        _no_search(patched)
        with pytest.raises(BudgetTooSmall, match="did you mean 6GiB") as hopeless:
            stowplan.fit(model, args, budget=6)
    least = sum(2 * p.nbytes for p in model.parameters()) + args[0].nbytes
    assert f"({least} bytes)" in str(hopeless.value)
    assert hopeless.value.minimum_bytes > least  # searches now
    fitted = stowplan.fit(model, args, budget=hopeless.value.minimum_bytes)
    assert stowplan.plans_of(fitted)[0].projected_peak_bytes <= hopeless.value.minimum_bytes


@dataclass(frozen=True, slots=True)
class _Bounded:
    """A candidate with one lower bound and one plan."""

    floor_bytes: int
    least: float
    seconds: float
    stretches: tuple[str, ...] = ()

    def bounds(self, _: int) -> Iterator[float]:
        yield self.least

    def draft(self, _: int) -> Draft:
        return cast(Draft, SimpleNamespace(projected_seconds=self.seconds))

    def tradeoffs(self) -> Iterable[Tradeoff]:
        return ()


@pytest.mark.parametrize(("gap", "seconds"), [(0.0, 9.96), (0.01, 10.0)])
def test_a_candidate_that_can_save_less_than_the_gap_is_not_examined(gap: float, seconds: float) -> None:
    found = (_Bounded(1, 9.0, 10.0), _Bounded(1, 9.95, 9.96))
    plain = _Bounded(100, 1.0, 1.0)  # needs more memory
    selector = Selector(plain, Baseline(1.0, 100), lambda _: found, "time", gap=gap)
    assert selector.answer(10)[0].projected_seconds == seconds


_PLANNED, _HOPELESS = _Bounded(1, 9.0, 10.0), _Bounded(1, inf, 10.0)


@pytest.mark.parametrize(
    ("other", "least", "is_made", "seconds"),
    [
        pytest.param(_PLANNED, 10.5, False, 10.0, id="its bound is above the best plan"),
        pytest.param(_PLANNED, 9.5, True, 9.6, id="its bound is below it"),
        pytest.param(_HOPELESS, 10.5, True, 9.6, id="there is no plan"),
    ],
)
def test_candidates_that_take_long_to_make_are_made_if_they_could_win(
    other: _Bounded, least: float, is_made: bool, seconds: float
) -> None:
    made = list[_Bounded]()

    def make() -> Iterator[_Bounded]:
        made.append(_Bounded(1, 9.6, 9.6))
        return iter(made)

    found = (CandidateGroup(least, make), other)
    plain = _Bounded(100, 1.0, 1.0)  # needs more memory
    selector = Selector(plain, Baseline(1.0, 100), lambda _: found, "time")
    assert selector.answer(10)[0].projected_seconds == seconds
    assert bool(made) is is_made
    assert len(selector.candidates) == 2  # which asks for all
