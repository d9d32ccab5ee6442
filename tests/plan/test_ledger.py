"""The ledger's books agree with the judge, whatever changes were made on the way."""

from random import Random

import pytest

from stowplan.plan.judge.simulate import simulate
from stowplan.plan.ledger import Ledger, State, steps_of
from stowplan.plan.pricing import Basis, Pricing
from stowplan.plan.problem import Problem, problem_of
from tests.support.steps import random_step, uneven_prices


def _problem(seed: int) -> Problem:
    graph = random_step(seed, layers=4 + seed % 14)
    pricing = uneven_prices(graph, seed)
    workspace = {op.id: 8 * (seed % 3) for op in graph.ops}
    return problem_of(graph, [pricing.seconds[op.id] for op in graph.ops], workspace)


def _judged(problem: Problem, states: list[State]) -> tuple[int, float]:
    graph = problem.graph
    seconds = dict(zip((op.id for op in graph.ops), problem.seconds, strict=True))
    own = {op.id: problem.temporary_bytes[i] for i, op in enumerate(graph.ops)}
    added = {
        op.id: sum(graph.tensors[u.tensor].nbytes or 0 for u in op.outputs if u.role == "accumulate")
        for op in graph.ops
    }
    workspace = {name: own[name] - added[name] for name in own}
    simulation = simulate(graph, steps_of(problem, states), Pricing(seconds, Basis.MEASURED, workspace))
    return simulation.peak_bytes, simulation.extra_seconds


@pytest.mark.parametrize("seed", range(60))
def test_books_agree_with_the_judge_after_any_changes(seed: int) -> None:
    problem = _problem(seed)
    ledger = Ledger(problem)
    random = Random(seed)
    gaps = range(len(ledger.states))
    for _ in range(25):
        for _ in range(random.randint(1, 4)):
            ledger.set_state(random.choice(gaps), random.choice(list(State)))
        assert (int(ledger.curve_bytes().max()), ledger.extra_seconds) == _judged(problem, ledger.states)


@pytest.mark.parametrize("seed", range(20))
def test_rolling_back_restores_every_entry(seed: int) -> None:
    problem = _problem(seed)
    ledger = Ledger(problem)
    random = Random(seed)
    gaps = range(len(ledger.states))
    for _ in range(20):
        before = (ledger.curve_bytes().tolist(), ledger.extra_seconds, list(ledger.states))
        for _ in range(random.randint(1, 5)):
            ledger.set_state(random.choice(gaps), random.choice(list(State)))
        ledger.roll_back()
        assert (ledger.curve_bytes().tolist(), ledger.extra_seconds, list(ledger.states)) == before
        ledger.set_state(random.choice(gaps), random.choice(list(State)))
        ledger.commit()


@pytest.mark.parametrize("seed", range(20))
def test_loading_all_states_books_what_setting_them_does(seed: int) -> None:
    problem = _problem(seed)
    random = Random(seed)
    one_by_one, at_once = Ledger(problem), Ledger(problem)
    at_once.load([random.choice(list(State)) for _ in at_once.states])
    states = [random.choice(list(State)) for _ in at_once.states]
    for gap, state in enumerate(states):
        one_by_one.set_state(gap, state)
    at_once.load(states)
    assert at_once.curve_bytes().tolist() == one_by_one.curve_bytes().tolist()
    assert at_once.extra_seconds == pytest.approx(one_by_one.extra_seconds)
