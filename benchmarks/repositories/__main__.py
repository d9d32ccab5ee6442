"""`python -m benchmarks.repositories [NAMES]` trains the entries of these names, or all, and writes the page.

The snapshots are in the folder of --folder or REPOSITORIES; docs/repositories.md says how to make them.
"""

import argparse
import logging
import os
import sys
import warnings
from pathlib import Path

from benchmarks.results import ROOT


def main() -> None:
    """Run what was asked for, add it to the results, write the page, and fail if there is a fault."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.repositories", description=__doc__)
    parser.add_argument("names", nargs="*", help="entries (all)")
    parser.add_argument("--folder", type=Path, default=os.environ.get("REPOSITORIES"), help="the snapshots")
    parser.add_argument("--seconds", type=int, default=120, help="of processor time for an entry (120)")
    parser.add_argument("--missing", action="store_true", help="only ways without results")
    parser.add_argument("--here", action="store_true", help="in this process, with all that it prints")
    parser.add_argument("--way", action="append", default=[], help="only this way, such as plain (all)")
    parser.add_argument("--manifest", action="store_true", help="print repositories and commits, run nothing")
    parser.add_argument("--page", action="store_true", help="only write the page from the results so far")
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    from benchmarks.repositories import families
    from benchmarks.repositories.page import write_page
    from benchmarks.repositories.run import FAULTS, Setup, line_of, read, run_apart, run_here

    entries = families.load()
    if given.manifest:
        pairs = dict.fromkeys((each.repository, each.commit) for each in entries.values())
        sys.stdout.writelines(f"{repository} {commit}\n" for repository, commit in pairs)
        return
    if given.folder is None and not given.page:
        parser.error("name the folder of the snapshots: --folder or REPOSITORIES")
    if unknown := set(given.names) - set(entries):
        parser.error(f"no entry is called {', '.join(sorted(unknown))}; there are {', '.join(entries)}")
    ways = [Setup(way) for way in given.way] or [*Setup]
    if given.here:
        for name in given.names:
            run_here(name, given.folder, lambda result: sys.stdout.write(line_of(result)), ways)
        return
    path = ROOT / "build" / "repositories.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    faults = 0
    for name in () if given.page else given.names or entries:
        known = {result.way for result in read(path) if result.name == name} if given.missing else set()
        if not (still := [way for way in ways if way not in known]):
            continue
        results = run_apart(entries[name], given.folder, given.seconds, still)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(map(line_of, results))
        for result in results:
            faults += result.outcome in FAULTS
            sys.stdout.write(
                f"{name:20} {result.way:14} {result.outcome:15} {result.seconds:6.1f} s  {result.words}\n"
            )
        sys.stdout.flush()
    write_page(entries, read(path), ROOT / "docs" / "repositories.md")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
