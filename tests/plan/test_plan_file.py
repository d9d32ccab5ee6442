"""Plans in files: what was written is what is read, and damage is noticed."""

import re
from random import Random

import pytest
from small_steps import training_step, uneven_prices

from stowplan.errors import BadInput
from stowplan.plan import file
from stowplan.plan.make import Planner
from stowplan.plan.plan import Plan


def _plan(seed: int) -> Plan:
    graph = training_step(seed, layers=7)
    planner = Planner.of(graph, uneven_prices(graph, seed), moves=500)
    return planner.plan((planner.minimum_bytes + planner.plain_peak_bytes) // 2)


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_survives_its_file(seed: int) -> None:
    plan = _plan(seed)
    assert file.read(file.write(plan)) == plan


def test_the_same_graph_gives_the_same_file() -> None:
    assert file.write(_plan(3)) == file.write(_plan(3))


def test_a_flipped_byte_is_noticed() -> None:
    text = file.write(_plan(1))
    random = Random(0)
    for _ in range(300):
        place = random.randrange(len(text))
        damaged = text[:place] + chr(ord(text[place]) ^ 1) + text[place + 1 :]
        with pytest.raises(BadInput):
            file.read(damaged)


def test_a_plan_of_another_version_says_so() -> None:
    text = file.write(_plan(1))
    later = re.sub(r'"version":\d+', '"version":99', text, count=1)
    assert later != text
    with pytest.raises(BadInput, match="version 99, not"):
        file.read(later)
