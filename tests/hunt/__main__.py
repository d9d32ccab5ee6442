"""Hunt from the command line.

python -m tests.hunt --seed 17                          one case: what it is, and what becomes of it
python -m tests.hunt --minutes 60 --from 1000 --out F   as many as there is time for, one line each into F
python -m tests.hunt --cases 200 --plant wrong-gradient with a fault planted in stowplan
"""

import argparse
import itertools
import logging
import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

from tests.support.machine import same_everywhere

from .cases import Case, draw_case
from .children import Child
from .counting import Tally, as_line
from .lockstep import Result, judge
from .plants import PLANTS
from .shrinking import shrunk
from .undone import UNDONE


def main() -> int:
    """The exit code is 1 if anything was found."""
    arguments = _parser().parse_args()
    plant = (PLANTS | UNDONE)[arguments.plant]() if arguments.plant else nullcontext()
    logging.getLogger("stowplan").setLevel(logging.ERROR)  # that a loop's changes ask for plans is no news
    with same_everywhere(), plant:
        if arguments.seed is not None:
            return _one(draw_case(arguments.seed))
        deadline = time.monotonic() + 60 * arguments.minutes if arguments.minutes else None
        count = arguments.cases or (None if deadline else 100)
        seeds = (
            itertools.count(arguments.first)
            if count is None
            else range(arguments.first, arguments.first + count)
        )
        return _many(seeds, deadline, arguments.out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.hunt", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--seed", type=int, help="run this case alone, and shrink it if it fails")
    parser.add_argument("--minutes", type=float, help="run cases for so long")
    parser.add_argument("--cases", type=int, help="run so many cases (100 if no time is given)")
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="SEED", help="the first seed")
    parser.add_argument("--out", type=Path, help="write a line of JSON for each case")
    parser.add_argument(
        "--plant", choices=sorted(PLANTS | UNDONE), help="plant a fault, to see that it is found"
    )
    return parser


def _one(case: Case) -> int:
    result = judge(case)
    _show(case, result)
    if not result.is_finding:
        return 0
    print("shrunk:")
    _show(*shrunk(case, result))
    return 1


def _many(seeds: Iterable[int], deadline: float | None, out: Path | None) -> int:
    tally = Tally()
    with out.open("a") if out else nullcontext() as lines, Child() as child:
        for seed in seeds:
            if deadline is not None and time.monotonic() > deadline:
                break
            case, result = draw_case(seed), child.judge(seed)
            if lines:
                lines.write(as_line(case, result) + "\n")
                lines.flush()
            if tally.add(case, result):
                print(f"a new kind of failure at seed {seed}, shrunk:")
                _show(*child.shrunk(case, result))
    print(tally.table())
    return int(bool(tally.failures))


def _show(case: Case, result: Result) -> None:
    print(case)
    print(f"{result.verdict} at {result.stage}: {result.message}")
    print(f"budget {result.budget} bytes; {result.cpu_seconds:.2f} s of the processor")
    print(result.trace, flush=True)


if __name__ == "__main__":
    sys.exit(main())
