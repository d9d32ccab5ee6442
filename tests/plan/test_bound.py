"""The solver of the bound: HiGHS alone gives what `scipy.optimize` gives, and is scipy's own module."""

import subprocess
import sys

import pytest

from stowplan.plan import highs
from stowplan.plan.bound import Crossings
from stowplan.plan.select import problem_in_order
from tests.support.steps import random_step, uneven_prices

_IMPORTS = """
import sys
from stowplan.plan.highs import _highs
core = _highs()
assert core is not None
assert "scipy.optimize" not in sys.modules
from scipy.optimize import linprog
assert sys.modules["scipy.optimize._highspy._core"] is core
assert linprog([1.0], A_ub=[[-1.0]], b_ub=[-2.0]).x[0] == 2.0
"""


@pytest.mark.parametrize("whole", [False, True])
def test_highs_alone_gives_what_scipy_gives(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = []
    for seed in range(4):
        graph = random_step(seed, layers=8)
        problems.append(problem_in_order(graph, uneven_prices(graph, seed)))
    cuts = [
        Crossings(problem, place) for problem in problems for place in range(problem.turn, problem.turn + 3)
    ]
    budgets = [sum(problem.nbytes) // share for problem in problems for share in (2, 3, 4)]

    def crossings() -> list[object]:
        return [cut.within(budget, whole=whole) for cut, budget in zip(cuts, budgets, strict=True)]

    alone = crossings()
    monkeypatch.setattr(highs, "_highs", lambda: None)
    assert alone == crossings()
    assert any(cut.within(budget).seconds > 0 for cut, budget in zip(cuts, budgets, strict=True))


@pytest.mark.slow
def test_whoever_imports_scipy_later_gets_the_same_solver() -> None:
    subprocess.run([sys.executable, "-c", _IMPORTS], check=True)
