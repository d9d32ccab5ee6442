"""The notes of a reader: alike ones as one line, unless all are asked for."""

import re
from collections.abc import Sequence

from rich.table import Table

from stowplan.ir import Note

_GROUPS = 8
_PARTICULARS = re.compile(r"'[^']*'|[\w.]*[0-9._][\w.]*|\b[A-Z]\w+")  # quoted, dotted, numbered, Capitalised


def notes_table(notes: Sequence[Note], *, everything: bool) -> Table | None:
    """The notes, or the first of each group that says the same of other things."""
    if not notes:
        return None
    table = Table.grid(padding=(0, 2))
    groups = [[note] for note in notes] if everything else _groups(notes)
    shown = groups if everything else groups[:_GROUPS]
    for group in shown:
        table.add_row(group[0].kind, group[0].where, _told(group))
    left = sum(map(len, groups[len(shown) :]))
    if left:
        table.add_row("", "", f"... and {left} more: --notes shows all")
    return table


def _groups(notes: Sequence[Note]) -> list[list[Note]]:
    """Notes that differ only in names and numbers, the largest group first."""
    groups: dict[tuple[str, str], list[Note]] = {}
    for note in notes:
        groups.setdefault((note.kind, _PARTICULARS.sub("_", note.what)), []).append(note)
    return sorted(groups.values(), key=len, reverse=True)


def _told(group: Sequence[Note]) -> str:
    return group[0].what + (f"  (and {len(group) - 1} like it)" if len(group) > 1 else "")
