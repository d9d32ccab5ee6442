"""Whoever watches a search sees it come further, better and no better than it can be."""

from itertools import pairwise

import pytest

from stowplan import Search
from stowplan.plan.options import PlanOptions
from stowplan.plan.planner import Planner
from stowplan.watch import PlanningPhase, Searching, watched_by
from tests.support.steps import random_step, uneven_prices


@pytest.mark.slow
def test_a_search_tells_its_best_so_far_and_how_far_that_is_from_the_bound() -> None:
    graph = random_step(3, layers=14)
    news: list[Searching | PlanningPhase] = []
    with watched_by(news.append):
        planner = Planner.of(graph, uneven_prices(graph, 3), options=PlanOptions(search=Search(moves=600)))
    budget = (planner.minimum_bytes + planner.plain_peak_bytes) // 2
    told = [searching for searching in news if isinstance(searching, Searching)]
    shares = [searching.share for searching in told]
    assert len(told) > 10
    assert shares[0] == 0.0
    assert all(one < other <= 1.0 for one, other in pairwise(shares))
    ratios = [found for searching in told if (found := searching.ratio_within(budget)) is not None]
    assert ratios == sorted(ratios, reverse=True)
    gaps = [found for searching in told if (found := searching.gap_within(budget)) is not None]
    assert len(gaps) == len(ratios) > 0
    assert min(gaps) >= 0
    assert planner.plan(budget).time_ratio <= ratios[-1]


@pytest.mark.slow
def test_watching_changes_nothing() -> None:
    graph = random_step(4, layers=12)
    alone = Planner.of(graph, uneven_prices(graph, 4), options=PlanOptions(search=Search(moves=300))).frontier
    with watched_by(lambda _: None):
        watched = Planner.of(
            graph, uneven_prices(graph, 4), options=PlanOptions(search=Search(moves=300))
        ).frontier
    assert alone == watched
