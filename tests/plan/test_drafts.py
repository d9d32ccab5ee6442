"""Draft, then Plan, once: a plan is made by `verify` alone, and nothing changes it."""

import ast
import copy
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from stowplan import Search
from stowplan.errors import IllegalPlan
from stowplan.plan.draft import Draft
from stowplan.plan.judge.verify import verify
from stowplan.plan.options import PlanOptions
from stowplan.plan.plan import Plan
from stowplan.plan.planner import Planner
from stowplan.plan.steps import Compute
from tests.support.steps import random_step, uneven_prices
from tests.test_layers import modules

MAKERS = {"Plan": "stowplan.plan.judge.verify", "PlannedStep": "stowplan.run.planning.planner"}
"""What is made at the end of the road alone, and by which module."""


@pytest.fixture(scope="module")
def draft() -> Draft:
    graph = random_step(5, layers=8)
    planner = Planner.of(graph, uneven_prices(graph, 5), options=PlanOptions(search=Search(moves=100)))
    return planner.draft((planner.minimum_bytes + planner.plain_peak_bytes) // 2)


def test_a_plan_is_made_of_a_legal_draft_and_says_the_same(draft: Draft) -> None:
    plan = verify(draft)
    assert isinstance(plan, Plan)
    assert not isinstance(plan, Draft)
    assert [getattr(plan, each.name) for each in fields(draft)] == [
        getattr(draft, each.name) for each in fields(draft)
    ]
    assert plan.draft() == draft
    assert verify(plan.draft()) == plan


def test_an_illegal_draft_is_no_plan(draft: Draft) -> None:
    last = max(number for number, step in enumerate(draft.steps) if isinstance(step, Compute))
    with pytest.raises(IllegalPlan, match="never runs"):
        verify(replace(draft, steps=draft.steps[:last]))


def test_a_plan_is_made_in_no_other_way(draft: Draft) -> None:
    with pytest.raises(TypeError, match=r"made by verify\(draft\)"):
        Plan(**{each.name: getattr(draft, each.name) for each in fields(draft)})


def test_nothing_changes_a_plan(draft: Draft) -> None:
    plan = verify(draft)
    with pytest.raises(TypeError, match="never changed"):
        replace(plan, cut_short="somebody")
    with pytest.raises(FrozenInstanceError):
        plan.cut_short = "somebody"  # type: ignore[misc]


def test_a_plan_can_be_copied(draft: Draft) -> None:
    plan = verify(draft)
    assert copy.deepcopy(plan) == copy.copy(plan) == plan


def _made_in(tree: ast.Module) -> Iterator[str]:
    """Which of these a module calls, or hands to a call that is no question of type."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            named = [each.id for each in (node.func, *node.args) if isinstance(each, ast.Name)]
            yield from MAKERS.keys() & set(named) if "isinstance" not in named else ()


def test_the_source_makes_plans_at_the_end_of_the_road_alone() -> None:
    found = {(made, name) for name, tree in modules() for made in _made_in(tree)}
    assert found == set(MAKERS.items())


@pytest.mark.parametrize(
    "line", ["Plan(graph, pricing)", "object.__new__(Plan)", "self.made = made_of(Plan)"]
)
def test_the_check_itself_sees_a_plan_that_is_made(line: str) -> None:
    assert list(_made_in(ast.parse(line))) == ["Plan"]
    assert not list(_made_in(ast.parse("def shown(plan: Plan) -> bool:\n    return isinstance(plan, Plan)")))
