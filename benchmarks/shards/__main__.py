"""Runs the study that is asked for."""

import sys

import benchmarks.shards
from benchmarks.shards import budgets, calibrate, elastic, exact, faults, memory, parameters, scaling

STUDIES = {
    "exact": exact.main,
    "budgets": budgets.main,
    "memory": memory.main,
    "scaling": scaling.main,
    "calibrate": calibrate.main,
    "faults": faults.main,
    "parameters": parameters.main,
    "elastic": elastic.main,
}


def main() -> None:
    """The first word names the study, the rest is its own."""
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    if asked in STUDIES:
        STUDIES[asked](sys.argv[2:])
    else:
        print(benchmarks.shards.__doc__)


if __name__ == "__main__":
    main()
