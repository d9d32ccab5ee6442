"""The memory curve of a step, drawn in rows of blocks with its peak marked and its phases named."""

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from stowplan.ir import Op, Phase
from stowplan.report.terminal import columns_of, curve_rows
from stowplan.units import format_bytes

_ROWS = 4


def memory_curve_drawing(curve: Sequence[int], ops: Sequence[Op], width: int, blocks: str) -> Group | None:
    """The curve under a mark at its peak, and below it where each phase begins."""
    if not curve:
        return None
    position = curve.index(max(curve))
    column = next(i for i, shown in enumerate(columns_of(len(curve), width)) if position in shown)
    label = f"{format_bytes(curve[position])} at op {position + 1:,} of {len(curve):,}"
    rows = (Text(row, "green", no_wrap=True) for row in curve_rows(curve, width, _ROWS, blocks))
    return Group(_mark(column, label, width), *rows, Text(_phases(ops, width), "dim"))


def _mark(column: int, label: str, width: int) -> Text:
    """A mark above a column, with its label on the side where there is room."""
    if column + len(label) + 2 <= width:
        return Text(" " * column + f"v {label}", "bold")
    return Text(f"{label} v".rjust(column + 1), "bold")


def _phases(ops: Sequence[Op], width: int) -> str:
    """The name of each phase under the column where it first begins, as far as there is room."""
    line = ""
    seen: set[Phase] = set()
    for column, shown in enumerate(columns_of(len(ops), width)):
        new = [ops[i].phase for i in shown if ops[i].phase not in seen]
        seen.update(new)
        if new and column >= len(line) + bool(line) and column + len(new[0]) <= width:
            line = line.ljust(column) + new[0]
    return line
