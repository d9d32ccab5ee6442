"""A comparison for people: the figures side by side, then the tensors that fare otherwise."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TypeAlias, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stowplan.ir.text import Labels
from stowplan.plan.explain.comparison import Change, Comparison
from stowplan.report.terminal import in_module, module_columns, print_section, print_trimmed
from stowplan.units import format_bytes, format_count, format_seconds

_LISTED = 15

Row: TypeAlias = tuple[str, str, str, str]
Cells: TypeAlias = Callable[[Sequence[Change]], tuple[str, str]]
Number = TypeVar("Number", int, float)


def show_comparison(
    comparison: Comparison, labels: Labels, console: Console, *, names: tuple[str, str]
) -> None:
    """Print the changes from the first to the second. `labels` are of a graph that has the tensors."""
    print_section(console, f"{names[0]} -> {names[1]}", _figures(comparison, labels))
    decided = [change for change in comparison.changes if change.is_decided_otherwise]
    others = [change for change in comparison.changes if not change.is_decided_otherwise]
    for title, changes, cells in (
        ("tensors with other decisions", decided, _decisions),
        ("tensors of other sizes, or at the peak of one alone", others, _sizes),
    ):
        if changes:
            print_section(console, f"{title} ({len(changes):,})", _changes(changes, labels, cells))
    if comparison.only_before or comparison.only_after:
        apart = f"{comparison.only_before:,} tensors only before, {comparison.only_after:,} only after"
        print_trimmed(console, Text(apart, "dim"))


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="cyan")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if not number else "right", overflow="fold")
    return table


def _figures(comparison: Comparison, labels: Labels) -> Table:
    table = _table("", "before", "after", "change")
    for row in _rows(comparison, labels):
        table.add_row(*row)
    return table


def _rows(comparison: Comparison, labels: Labels) -> Iterator[Row]:
    before, after = comparison.before, comparison.after
    yield _bytes("peak", before.peak_bytes, after.peak_bytes)
    yield "  while", before.peak_op, after.peak_op, ""
    if labels.captured:
        yield "  in", labels.place(before.peak_op), labels.place(after.peak_op), ""
    if before.allowed_bytes is not None or after.allowed_bytes is not None:
        yield _bytes("allowed", before.allowed_bytes, after.allowed_bytes)
    if before.measured_peak_bytes is not None or after.measured_peak_bytes is not None:
        yield _bytes("measured peak", before.measured_peak_bytes, after.measured_peak_bytes)
    ratios = (before.time_ratio or 1.0, after.time_ratio or 1.0)
    yield "time over baseline", f"{ratios[0]:.3f} x", f"{ratios[1]:.3f} x", _share(*ratios)
    if before.measured_seconds is not None or after.measured_seconds is not None:
        yield _pair("measured time", before.measured_seconds, after.measured_seconds, format_seconds)
    yield "steps", f"{before.runs:,}", f"{after.runs:,}", f"{after.runs - before.runs:+,}"
    yield "  recomputed", f"{before.runs_again:,}", f"{after.runs_again:,}", ""
    yield "extra MACs", format_count(before.extra_macs), format_count(after.extra_macs), ""


def _bytes(label: str, before: int | None, after: int | None) -> Row:
    return _pair(label, before, after, format_bytes)


def _pair(label: str, before: Number | None, after: Number | None, form: Callable[[Number], str]) -> Row:
    """Two figures and the share by which they differ; a side without one has a dash."""
    shown = ["-" if value is None else form(value) for value in (before, after)]
    return label, shown[0], shown[1], _share(before, after)


def _share(before: float | None, after: float | None) -> str:
    return f"{after / before - 1:+.1%}" if before and after is not None else ""


def _changes(changes: Sequence[Change], labels: Labels, cells: Cells) -> Table:
    if labels.captured:
        return _changes_by_module(changes, labels, cells)
    table = _table("tensor", "bytes", "before", "after", "at the peak")
    for change in changes[:_LISTED]:
        name = Text(change.tensor, no_wrap=True, overflow="ellipsis")
        table.add_row(name, format_bytes(change.nbytes), *cells([change]), _at_peak(change))
    if len(changes) > _LISTED:
        rest = sum(change.nbytes for change in changes[_LISTED:])
        table.add_row(f"{len(changes) - _LISTED:,} more", format_bytes(rest))
    return table


def _changes_by_module(changes: Sequence[Change], labels: Labels, cells: Cells) -> Table:
    by_name = {change.tensor: change for change in changes}
    alike: dict[tuple[str, str, str], list[str]] = {}
    for change in changes:
        alike.setdefault((change.before, change.after, _at_peak(change)), []).append(change.tensor)
    rows = [(group, fate) for fate, names in alike.items() for group in labels.groups(names)]
    shown, rest = rows[:_LISTED], rows[_LISTED:]
    table = module_columns(("bytes", "n"), ("before", "after", "at the peak"))
    for group, (_, _, at_peak) in shown:
        where = in_module(group.module, group.what, group.line)
        members = [by_name[name] for name in group.names]
        table.add_row(format_bytes(group.nbytes), f"{len(group.names):,}", where, *cells(members), at_peak)
    if rest:
        size, count = sum(group.nbytes for group, _ in rest), sum(len(group.names) for group, _ in rest)
        table.add_row(format_bytes(size), f"{count:,}", "more")
    return table


def _decisions(changes: Sequence[Change]) -> tuple[str, str]:
    """Of tensors with the same decisions."""
    return changes[0].before, changes[0].after


def _sizes(changes: Sequence[Change]) -> tuple[str, str]:
    before, after = (
        sum(sizes) for sizes in zip(*((c.nbytes_before, c.nbytes) for c in changes), strict=True)
    )
    return format_bytes(before), format_bytes(after)


def _at_peak(change: Change) -> str:
    match change.at_peak_before, change.at_peak_after:
        case True, False:
            return "no longer"
        case False, True:
            return "now"
        case True, True:
            return "still"
        case _:
            return "never"


def comparison_json(comparison: Comparison) -> dict[str, object]:
    """What `stowplan compare --json` prints."""
    return asdict(comparison)
