"""Tests that compare seconds: each runs alone and gets three tries, because other work shares the machine."""

import functools
from collections.abc import Callable
from typing import ParamSpec

import pytest

Parameters = ParamSpec("Parameters")
RETRIES = 2


def timed(test: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Marks a test `timing` and repeats it while an assertion fails, at most `RETRIES` times."""

    @functools.wraps(test)
    def tried(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        for attempt in range(RETRIES):
            try:
                return test(*args, **kwargs)
            except AssertionError as fault:
                print(f"try {attempt + 1} failed: {fault}")
        return test(*args, **kwargs)

    marked: Callable[Parameters, None] = pytest.mark.timing(tried)
    return marked
