"""`python -m benchmarks.zoo` runs the models of the packages that are installed and writes docs/zoo.md."""

import argparse
import json
import logging
import os
import sys
import warnings
from dataclasses import asdict

from benchmarks.results import ROOT


def main() -> None:
    """Run what was asked for, add it to the results, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__)
    parser.add_argument("--only", default="", help="parts of PACKAGE/NAME, with commas")
    parser.add_argument("--seconds", type=int, default=120, help="processor time of one model (120)")
    parser.add_argument("--missing", action="store_true", help="only models without a result")
    parser.add_argument("--again", action="store_true", help="only models that were not fitted so far")
    parser.add_argument("--roomy", action="store_true", help="only a roomy budget, in a third of the time")
    parser.add_argument("--page", action="store_true", help="only write the page from the results so far")
    given = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "KINETO_LOG_LEVEL": "99"}
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    from benchmarks.zoo import language, others
    from benchmarks.zoo.page import write_page
    from benchmarks.zoo.run import Result, read, run_all

    path = ROOT / "build" / "zoo.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {
        (result.package, result.name)
        for result in read(path)
        if given.missing or (given.again and result.outcome == "fitted")
    }
    every = [*others.cases(), *language.cases()]
    parts = given.only.split(",")
    chosen = (case for part in parts for case in every if part in f"{case.package}/{case.name}")
    cases = [case for case in dict.fromkeys(chosen) if (case.package, case.name) not in known]

    def report(result: Result) -> None:
        with path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        sys.stdout.write(
            f"{result.outcome:16} {result.seconds:6.1f} s  {result.package}/{result.name}  {result.cause}"
            f"  {result.compiled}\n"
        )
        sys.stdout.flush()

    if not given.page:
        run_all(cases, given.seconds, report, roomy_only=given.roomy)
    write_page(read(path), ROOT / "docs" / "zoo.md")


if __name__ == "__main__":
    main()
