"""Tests that hold a training step to a memory limit: `pytest examples/test_memory.py`.

stowplan's pytest plugin brings the marker. What fixtures allocate does not count: the limit is for the step.
"""

from collections.abc import Callable
from typing import Any

import pytest

import stowplan
from examples.training_script import step

Step = Callable[[], Any]


@pytest.fixture
def eager() -> Step:
    model, batch = step()
    return lambda: model(*batch)


@pytest.fixture
def fitted() -> Step:
    model, batch = step()
    model = stowplan.fit(model, batch, budget="7.6MiB")
    return lambda: model(*batch)


@pytest.mark.limit_peak("7.6MiB")
def test_the_fitted_step_stays_within_half_of_the_memory(fitted: Step) -> None:
    fitted().backward()


@pytest.mark.limit_peak("7.6MiB")
@pytest.mark.xfail(strict=True, reason="eager takes twice as much: the limit is noticed")
def test_eager_does_not(eager: Step) -> None:
    eager().backward()
