"""Compares two files of results, or two folders of them: `python -m benchmarks.compare old.jsonl new.jsonl`.

It prints the figures that changed by more than a share of the old value, the largest change first, and says
which figures only one side has. It judges nothing: the exit code is 0 whatever changed.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from rich.table import Table

from benchmarks.results import Result, read_results

SHARE = 0.05
Key: TypeAlias = tuple[str, str, str, str]
Figures: TypeAlias = Mapping[Key, Result]


def figures_of(path: Path) -> Figures:
    """The results of a file or a folder by study, case, way and figure."""
    return {(each.study, each.case, each.way, each.figure): each for each in read_results(path)}


def change(old: float, new: float) -> float:
    """The difference as a share of the old value; infinite if that was zero."""
    if old == new:
        return 0.0
    return (new - old) / abs(old) if old else float("inf") * (1 if new > old else -1)


def changed(old: Figures, new: Figures, share: float) -> list[tuple[Key, float]]:
    """Figures of both sides that differ by more than `share`, the largest change first."""
    changes = {key: change(old[key].value, new[key].value) for key in old.keys() & new.keys()}
    found = [(key, each) for key, each in changes.items() if abs(each) > share]
    return sorted(found, key=lambda item: (-abs(item[1]), item[0]))


def table_of(old: Figures, new: Figures, share: float) -> Table:
    """One row for each figure that changed."""
    table = Table(box=None, pad_edge=False)
    for heading in ("study", "case", "way", "figure"):
        table.add_column(heading, overflow="fold")
    for heading in ("old", "new", "change"):
        table.add_column(heading, justify="right")
    for key, each in changed(old, new, share):
        table.add_row(*key, _shown(old[key]), _shown(new[key]), f"{each:+.1%}")
    return table


def remarks_on(old: Figures, new: Figures, share: float) -> Iterator[str]:
    """How many figures were compared and changed, and which only one side has."""
    both = old.keys() & new.keys()
    yield f"{len(changed(old, new, share))} of {len(both)} figures changed by more than {share:.0%}"
    for side, figures in (("old", old), ("new", new)):
        for key in sorted(figures.keys() - both):
            yield f"only in {side}: {', '.join(key)}"


def _shown(result: Result) -> str:
    whole = result.value.is_integer()
    return f"{result.value:,.0f} {result.unit}" if whole else f"{result.value:,.4g} {result.unit}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and the remarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("old", type=Path, help="a .jsonl file of results, or a folder of such files")
    parser.add_argument("new", type=Path)
    parser.add_argument(
        "--share", type=float, default=SHARE, help=f"smallest change to print, default {SHARE}"
    )
    asked = parser.parse_args(argv)
    old, new = figures_of(asked.old), figures_of(asked.new)
    if changed(old, new, asked.share):
        Console(soft_wrap=True).print(table_of(old, new, asked.share))
    print("\n".join(remarks_on(old, new, asked.share)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
