"""A training with sharded parameters goes on with fewer workers after one of them was killed."""

from pathlib import Path

import pytest

from tests.support.workers.elastic import Attempt, losses_alone, losses_in

pytestmark = [pytest.mark.torch, pytest.mark.distributed]


def test_a_training_that_lost_a_worker_goes_on_with_fewer(tmp_path: Path) -> None:
    expected = losses_alone(3)
    assert min(abs(expected[step] / expected[step - 1] - 1) for step in (2, 3)) > 1e-6  # another step is seen
    two = losses_in(Attempt("sequence=2", until=2, is_lost=True), tmp_path)
    one = losses_in(Attempt("data=1", until=3, is_lost=False), tmp_path)
    assert ([*two], [*one]) == ([1], [2, 3])
    assert {**two, **one} == pytest.approx(expected, rel=1e-12)
