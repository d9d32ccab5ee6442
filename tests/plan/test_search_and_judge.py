"""Search and judges agree on small random steps, and a third that follows values agrees with both."""

from collections import Counter

import pytest

from tests.hunt.plans import case

CASES = 500
PARTS = 20


@pytest.mark.parametrize("part", range(PARTS))
def test_search_judges_and_values_say_the_same(part: int) -> None:
    found = Counter[str]()
    for seed in range(part, CASES, PARTS):
        found += case(seed)
    assert found["schedules"] == CASES // PARTS
    assert found["damaged and accepted"] > 5, "damage that does no harm is let through"
    assert found["damaged and refused"] > 30
