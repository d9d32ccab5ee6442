"""Drawing in a terminal: a console of readable width, curves and bars made of block characters."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil
from textwrap import fill

from rich.console import Console, Group, RenderableType
from rich.segment import Segment, Segments

from stowplan.units import printable

WIDTH = 100
_BLOCKS = " ▁▂▃▄▅▆▇█"
_PLAIN_BLOCKS = " ...:::##"
_GLUE = "\u00a0"  # a blank that lines are not broken at


def console_for_output() -> Console:
    """A console as wide as the terminal but at most WIDTH; a pipe gets WIDTH. NO_COLOR is heeded."""
    console = Console(highlight=False, markup=False, emoji=False)
    console.width = min(WIDTH, console.width) if console.is_terminal else WIDTH
    return console


def print_trimmed(console: Console, *parts: RenderableType) -> None:
    """Print without the blanks that fill lines up, which would end in files and diffs.

    What comes from a file may hold anything: characters that would steer the terminal are shown as a dot.
    """
    for line in console.render_lines(Group(*parts), pad=False):
        console.print(Segments([*_trimmed(line, console.width), Segment.line()]), end="")


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
    return fill(", ".join(item.replace(" ", _GLUE) for item in items), width).replace(_GLUE, " ")


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


def bar(share: float, width: int, blocks: str) -> str:
    """A bar over `share` of the width; anything above zero can be seen."""
    return blocks[-1] * (max(1, round(share * width)) if share > 0 else 0)
