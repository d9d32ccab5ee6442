"""A search ends near its bound, after a time limit or when the user says so, with the best plan so far."""

import os
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from time import process_time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stowplan
from stowplan import Search, watch
from stowplan.api import load_plan, planner_for
from stowplan.cli.main import main
from stowplan.errors import BadUse, BudgetTooSmall
from stowplan.ir import Graph
from stowplan.plan import frontier
from stowplan.plan.files import plan_file
from stowplan.plan.native.build import SWITCH
from stowplan.plan.options import PlanOptions
from stowplan.plan.select import Candidate, Selector, planner_of
from stowplan.watch import Patience, PlanningPhase, Searching, ended_by, limited_to, watched_by
from tests.support.steps import random_step, uneven_prices


@pytest.fixture
def cold_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of any op."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _until(gap: float) -> PlanOptions:
    return PlanOptions(("recompute",), search=Search(moves=160, gap=gap))


_TO_THE_END = _until(0.0)


def _planner(seed: int, options: PlanOptions) -> Selector[Candidate]:
    graph = random_step(seed, layers=8)
    return planner_of(graph, uneven_prices(graph, seed), options)


@cache
def _budgets(seed: int) -> list[int]:
    """From just below the baseline's peak to near the smallest budget."""
    planner = _planner(seed, _TO_THE_END)
    low, high = planner.minimum_bytes, planner.baseline.peak_bytes
    return [high - (high - low) * share // 4 for share in (1, 2, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "gap"), [(4, 0.01), (6, 0.2)])
def test_a_plan_is_as_near_to_the_best_as_was_asked(seed: int, gap: float) -> None:
    whole, near = _planner(seed, _TO_THE_END), _planner(seed, _until(gap))
    for budget in _budgets(seed):
        plan, best = near.plan(budget), whole.plan(budget)
        assert plan.projected_peak_bytes <= budget
        assert plan.projected_seconds <= (1 + gap) * best.projected_seconds
        assert plan.bound_seconds <= best.projected_seconds * (1 + 1e-9)
        assert plan == _planner(seed, _until(gap)).plan(budget)


def test_a_plan_near_its_bound_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, (budget, *_) = _planner(3, _until(0.5)), _budgets(3)
    monkeypatch.delattr(frontier._Search, "sweep")  # which a search of all budgets needs
    plan = planner.plan(budget)
    assert 0 < plan.gap <= 0.5 or plan.gap == 0
    assert plan.minimum_bytes is None
    with pytest.raises(AttributeError, match="sweep"):
        _planner(3, _TO_THE_END).plan(budget)


def _clock(monkeypatch: pytest.MonkeyPatch, ticks: int) -> None:
    """Let an hour pass after this number of looks at the time."""
    looks = iter(range(10**9))
    monkeypatch.setattr(watch, "monotonic", lambda: 3600.0 * (next(looks) > ticks))


@pytest.mark.slow
@pytest.mark.parametrize(("switch", "ticks"), [("1", 30), ("0", 30), ("0", 200)])
def test_a_time_limit_gives_the_best_plan_so_far(
    switch: str, ticks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library looks at the time every few hundred moves, the search in Python at each."""
    monkeypatch.setenv(SWITCH, switch)
    budget = _budgets(6)[1]
    _clock(monkeypatch, ticks)
    with limited_to(5.0):
        plan = _planner(6, _until(1e-9)).plan(budget)
    assert plan.projected_peak_bytes <= budget
    assert plan.cut_short == "the time limit of 5 s"
    assert "the search was ended by the time limit of 5 s, gap" in repr(plan)
    assert plan.gap > 0
    assert plan_file.read(plan_file.write(plan)).cut_short == plan.cut_short


def test_a_refusal_says_that_the_search_was_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = _planner(3, _TO_THE_END)
    _clock(monkeypatch, 1)
    with limited_to(5.0), pytest.raises(BudgetTooSmall, match="ended by the time limit of 5 s, and a longer"):
        planner.plan(1)


def test_a_limit_inside_of_another_does_not_outlast_it() -> None:
    outer = Patience()
    with ended_by(outer), limited_to(1000.0):
        assert watch.patience().over == ""
        outer.end("Ctrl-C")
        assert watch.patience().over == "Ctrl-C"
    assert watch.patience().over == ""


@pytest.mark.parametrize(("name", "value"), [("time_limit", 0.0), ("time_limit", -1.0), ("gap", -0.1)])
def test_limits_that_make_no_sense_are_refused(name: str, value: float) -> None:
    made: Any = Search
    with pytest.raises(BadUse, match=f"{name} is"):
        made(**{name: value})


@pytest.fixture
def graph_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Graph], str]:
    from stowplan.formats import stow
    from stowplan.ir import Document

    def written(graph: Graph) -> str:
        path = tmp_path_factory.mktemp("graphs") / "step.stow.json"
        path.write_text(stow.write(Document("stow", graph)), encoding="utf-8")
        return str(path)

    return written


@pytest.mark.slow
def test_one_interrupt_keeps_the_best_plan_and_two_end(
    graph_file: Callable[[Graph], str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = graph_file(random_step(6, layers=8))
    budget = str(planner_for(path).baseline.peak_bytes * 7 // 8)
    usual, interrupts = signal.getsignal(signal.SIGINT), [1]
    start = frontier._Search.sweep

    def sweep(search: frontier._Search, *args: object, **kwargs: object) -> None:
        for _ in range(interrupts[0]):
            os.kill(os.getpid(), signal.SIGINT)
        start(search, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(frontier._Search, "sweep", sweep)
    words = ["plan", path, "--budget", budget, "--gap", "0", "--allow", "recompute"]
    assert main([*words, "-o", f"{path}.plan"]) == 0
    assert "using the best plan so far" in capsys.readouterr().err
    assert load_plan(f"{path}.plan").cut_short == "Ctrl-C"
    interrupts[0] = 2
    assert main(words) == 130
    assert signal.getsignal(signal.SIGINT) is usual


def test_an_interrupt_before_there_is_a_plan_ends(
    graph_file: Callable[[Graph], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = graph_file(random_step(6, layers=8))

    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("went on after Ctrl-C")

    monkeypatch.setattr("stowplan.api.planner_of", interrupted)
    assert main(["plan", path, "--budget", "1GB", "--allow", "recompute"]) == 130


def test_a_search_for_one_budget_is_watched() -> None:
    news: list[Searching | PlanningPhase] = []
    budget = _budgets(3)[2]
    with watched_by(news.append):
        _planner(3, _until(0.5)).plan(budget)
    assert any(isinstance(each, Searching) for each in news)


class _Blocks(nn.Module):
    """Layers whose tiles take far longer to look through than a step takes."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        how: Any = {"batch_first": True, "dropout": 0.1}
        self.layers = nn.Sequential(*(nn.TransformerEncoderLayer(48, 4, 96, **how) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.mean(self.layers(x).square())


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.usefixtures("cold_cache")
def test_the_smallest_budget_of_a_refusal_is_searched_for_no_longer_than_the_limit() -> None:
    model, x = _Blocks(2), torch.randn(4, 17, 48)
    with pytest.raises(BudgetTooSmall) as found:
        stowplan.fit(model, (x,), budget=x.nbytes, search=Search(time_limit=0.5))
    begun = process_time()
    assert found.value.minimum_bytes > x.nbytes
    assert found.value.ended == "the time limit of 0.5 s"
    assert process_time() - begun < 8  # without a limit it takes 30 s
    beside = found.value.beside(1000, "more")
    assert beside.minimum_bytes == found.value.minimum_bytes + 1000
    assert beside.ended == found.value.ended


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.usefixtures("cold_cache")
def test_all_searches_of_one_call_share_the_limit() -> None:
    """The step with the optimizer's state in memory, the one with its state on disk, and what they refuse."""
    model, x = _Blocks(1), torch.randn(4, 17, 48)
    optimizer = torch.optim.AdamW(model.parameters())
    begun = process_time()
    with pytest.raises(BudgetTooSmall) as found:
        stowplan.fit(
            model,
            (x,),
            budget=x.nbytes,
            search=Search(time_limit=0.5),
            allow=("recompute", "offload"),
            optimizer=optimizer,
        )
    assert found.value.ended == "the time limit of 0.5 s"
    assert process_time() - begun < 8


def test_a_search_that_was_run_to_its_end_says_so() -> None:
    with pytest.raises(BudgetTooSmall) as found:
        _planner(3, _TO_THE_END).plan(1)
    assert found.value.ended == ""
