"""Shrinking: a failing case loses actions, ops and peculiarities for as long as it fails in the same way."""

import time

from .cases import Case
from .lockstep import Result, judge


def shrunk(case: Case, result: Result, *, limit_seconds: float = 10.0) -> tuple[Case, Result]:
    """The smallest case found that has the same kind of failure, and its result."""
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        for smaller in case.smaller():
            if time.monotonic() > deadline:
                break
            found = judge(smaller)
            if found.likeness == result.likeness:
                case, result = smaller, found
                break
        else:
            break
    return case, result
