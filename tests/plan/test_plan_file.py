"""Plans in files: what was written is what is read, and damage is noticed."""

import json
import re
from collections.abc import Callable
from hashlib import sha256
from random import Random
from typing import Any

import pytest

from stowplan import Search
from stowplan.errors import BadInput
from stowplan.plan.files import plan_file
from stowplan.plan.options import PlanOptions
from stowplan.plan.plan import Plan
from stowplan.plan.planner import Planner
from tests.support.steps import random_step, uneven_prices


def _plan(seed: int) -> Plan:
    graph = random_step(seed, layers=7)
    planner = Planner.of(graph, uneven_prices(graph, seed), options=PlanOptions(search=Search(moves=500)))
    return planner.plan((planner.minimum_bytes + planner.plain_peak_bytes) // 2)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.slow
def test_a_plan_survives_its_file(seed: int) -> None:
    plan = _plan(seed)
    assert plan_file.read(plan_file.write(plan)) == plan


def test_the_same_graph_gives_the_same_file() -> None:
    assert plan_file.write(_plan(3)) == plan_file.write(_plan(3))


def test_a_flipped_byte_is_noticed() -> None:
    text = plan_file.write(_plan(1))
    random = Random(0)
    for _ in range(300):
        place = random.randrange(len(text))
        damaged = text[:place] + chr(ord(text[place]) ^ 1) + text[place + 1 :]
        with pytest.raises(BadInput):
            plan_file.read(damaged)


def test_a_plan_of_another_version_says_so() -> None:
    text = plan_file.write(_plan(1))
    later = re.sub(r'"version":\d+', '"version":99', text, count=1)
    assert later != text
    with pytest.raises(BadInput, match="version 99, and this"):
        plan_file.read(later)


def _resealed(plan: Plan, change: Callable[[dict[str, Any]], object]) -> str:
    """The plan's file with another content, under a digest that fits."""
    content = json.loads(plan_file.write(plan))["content"]
    change(content)
    body = json.dumps(content)
    digest = f"sha256:{sha256(body.encode()).hexdigest()}"
    return f'{{"format":"stowplan.plan","version":2,"digest":"{digest}","content":{body}}}'


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "has no price": lambda content: content["pricing"]["seconds"].popitem(),
    "a figure that nothing can have": lambda content: content.update(plain_seconds=-1.0),
    "a number of bytes": lambda content: content.update(minimum_bytes=10**400),
    "not a legal plan": lambda content: content["steps"].reverse(),
    "is none of": lambda content: content["steps"].append([["deep"]]),
    "never runs": lambda content: content.update(steps=[s for s in content["steps"] if s[0] != "free"][:1]),
    "no such tensor": lambda content: content["decisions"].update(nobody=["keep"]),
    "no op makes it": lambda content: content["decisions"].update(x=["recompute", True]),
    "without ops or steps": lambda content: content.update(steps=[], projected_curve_bytes=[]),
    "more than 64": lambda content: content["decisions"].update(nobody=["tile", "s", [1] * 65]),
    "more than 8 deep": lambda content: content.update(tile_maps=[_nested_map(9)]),
    "stores nothing": lambda content: content["steps"].insert(0, ["store", []]),
}


def _nested_map(depth: int) -> dict[str, object]:
    figures = {"parts": [1], "tiles": 1, "levels": [], "halo_share": 0.0, "extra_macs": 0}
    found: dict[str, object] = {}
    for _ in range(depth + 1):
        within = [found] if found else []
        found = {"sweep": "s", **figures, "backward_peak_bytes": 0, "within": within}
    return found


@pytest.mark.parametrize("told", DAMAGES)
@pytest.mark.slow
def test_a_plan_is_checked_as_a_whole_when_it_is_read(told: str) -> None:
    with pytest.raises(BadInput, match=told):
        plan_file.read(_resealed(_plan(2), DAMAGES[told]))


def test_a_file_that_nests_without_end_is_refused() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    with pytest.raises(BadInput, match="nested too deeply"):
        plan_file.read(f'{{"format":"stowplan.plan","version":2,"digest":"","content":{deep}}}')


def test_a_sealed_file_without_damage_is_read() -> None:
    assert plan_file.read(_resealed(_plan(2), lambda _: None)) == _plan(2)
