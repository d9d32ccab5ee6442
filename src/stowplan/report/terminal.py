"""Drawing in a terminal: a console of readable width, bars and memory curves made of block characters."""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from textwrap import fill

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from stowplan.ir import Op, Phase
from stowplan.ir.text import TensorGroup
from stowplan.units import format_bytes, printable

WIDTH = 100
INDENT = 2  # of what stands below a heading
_BLOCKS = " ▁▂▃▄▅▆▇█"
_PLAIN_BLOCKS = " ...:::##"
_GLUE = "\u00a0"  # a blank that lines are not broken at


class _Console(Console):
    """rich ends the process when nobody reads on; what that means is for the command to say."""

    def on_broken_pipe(self) -> None:
        raise


def console_for_output(*, to_errors: bool = False) -> Console:
    """A console as wide as the terminal or COLUMNS, at most WIDTH; a pipe gets WIDTH. NO_COLOR is heeded."""
    console = _Console(highlight=False, markup=False, emoji=False, force_jupyter=False, stderr=to_errors)
    is_known = console.is_terminal or "COLUMNS" in os.environ
    console.width = min(WIDTH, console.width) if is_known else WIDTH
    return console


def print_trimmed(console: Console, *parts: RenderableType) -> None:
    """Print without the blanks that fill lines up, which would end in files and diffs.

    What comes from a file may hold anything: characters that would steer the terminal are shown as a dot.
    """
    for line in console.render_lines(Group(*parts), pad=False):
        console.print(Segments([*_trimmed(line, console.width), Segment.line()]), end="")


def print_section(console: Console, heading: str, body: RenderableType | None) -> None:
    """A heading and, indented below it, a body; nothing if there is no body."""
    if body is not None:
        print_trimmed(console, Text(heading, "bold"), Padding(body, (0, 0, 1, INDENT)))


def _trimmed(line: list[Segment], width: int) -> list[Segment]:
    shown = [Segment(printable(text), style) for text, style, _ in line]
    kept = Segment.adjust_line_length(shown, width, pad=False)  # a dot may be wider than what it stands for
    while kept and not kept[-1].text.strip():
        kept.pop()
    if kept:
        kept[-1] = Segment(kept[-1].text.rstrip(), kept[-1].style)
    return kept


def wrapped(items: Iterable[str], width: int) -> str:
    """Items separated by commas, over several lines where needed, none of them broken."""
    glued = ", ".join(item.replace(" ", _GLUE) for item in items)
    return fill(glued, width, break_long_words=False, break_on_hyphens=False).replace(_GLUE, " ")


def blocks_of(console: Console) -> str:
    """Nine characters from empty to full that the console's encoding has."""
    return _BLOCKS if console.encoding.lower().startswith("utf") else _PLAIN_BLOCKS


def columns_of(count: int, width: int) -> list[range]:
    """Which of `count` values each of `width` columns shows: several where they crowd, none left out."""
    edges = [column * count // width for column in range(width + 1)]
    return [range(low, max(low + 1, high)) for low, high in pairwise(edges)]


def curve_rows(values: Sequence[int], width: int, rows: int, blocks: str) -> list[str]:
    """A curve from zero to its maximum as rows of text, top row first. A column shows its largest value."""
    top = max(values, default=0) or 1
    tallest = (max(values[i] for i in column) for column in columns_of(len(values), width))
    levels = [ceil(value / top * rows * 8) for value in tallest]
    return [
        "".join(blocks[min(8, max(0, level - 8 * row))] for level in levels) for row in reversed(range(rows))
    ]


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar over `share` of its column, which is `most` wide if there is room; above zero it can be seen."""

    share: float
    most: int
    blocks: str

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        width = max(1, round(self.share * min(self.most, options.max_width))) if self.share > 0 else 0
        yield Text(self.blocks[-1] * width, "green")

    def __rich_measure__(self, _: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, min(self.most, options.max_width))


def modules_table(
    groups: Sequence[TensorGroup], most: int, note: Callable[[TensorGroup], str] = lambda _: ""
) -> Table:
    """Tensors of a captured step by module, with a note on each; those over `most` are summed up."""
    shown, rest = groups[:most], groups[most:]
    table = module_columns(("bytes", "n"))
    for group in shown:
        figures = format_bytes(group.nbytes), f"{len(group.names):,}"
        table.add_row(*figures, in_module(group.module, group.details, note(group)))
    if rest:
        size, count = sum(group.nbytes for group in rest), sum(len(group.names) for group in rest)
        table.add_row(format_bytes(size), f"{count:,}", "more")
    return table


def module_columns(figures: Iterable[str], others: Iterable[str] = ()) -> Table:
    """A table with figures, a module, and other columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="cyan")
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("module", *others):
        table.add_column(heading, overflow="fold")
    return table


def in_module(module: str, *details: str) -> Text:
    """A module path, and below it what is meant in it: paths are long, and lines may have 80 columns."""
    return Text.assemble(module, ("\n" + ", ".join(filter(None, details)), "dim"))


def table_or_lists(table: Table, console: Console, width: int) -> Table:
    """The table, if it has room for its figures without cutting them; or else a list for each of its rows."""
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    for column, cells in zip(table.columns, columns, strict=True):
        if column.justify == "right":
            column.min_width = max(map(len, cells), default=0)
    if Measurement.get(console, console.options.update(width=sys.maxsize), table).minimum <= width:
        return table
    lists = Table.grid(padding=(0, 2))
    for row in zip(*columns, strict=True):
        for column, cell in zip(table.columns, row, strict=True):
            lists.add_row(Text(str(column.header), "cyan"), cell)
        lists.add_row()
    return lists


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
