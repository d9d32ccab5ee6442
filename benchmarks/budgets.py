"""Loops drawn at random, counted below PyTorch: `python -m benchmarks.budgets [CASES] [FIRST]`.

Prints each case in which an iteration took more than its budget before anything was said, and how many of
all iterations were within it; ends with 1 if there is such a case.
"""

import sys
import tempfile
from pathlib import Path

from tests.support.budget_cases import run_in_processes
from tests.support.live_bytes import counting_library


def main() -> int:
    """Run the cases; 1 if one exceeded its budget in silence."""
    given = [int(text) for text in sys.argv[1:]]
    count, first = (*given, *(200, 0)[len(given) :])
    silent = within = told = 0
    with tempfile.TemporaryDirectory() as folder:
        library = counting_library(Path(folder))
        for outcome in run_in_processes(range(first, first + count), library):
            within += sum(over <= 0 for over in outcome.over)
            told += sum(over > 0 for over in outcome.over)
            silent += outcome.is_silent
            if outcome.is_silent:
                print(outcome, flush=True)
    print(f"{count} cases: {within} iterations within the budget, {told} above it; {silent} cases in silence")
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
