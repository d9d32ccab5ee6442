"""What was seen of a script: the peak of an iteration, what holds it, what grows, and what needs no plan."""

import json
import linecache
from collections.abc import Sequence
from dataclasses import asdict
from os.path import basename

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from stowplan.observe.record import CodePlace, PeakShare, Remedy, RunRecord, WatchRecord
from stowplan.report.terminal import Bar, blocks_of, print_section, print_trimmed
from stowplan.units import format_bytes

_BAR = 30
_LINES = 8  # of what holds the peak
_SEGMENTS = 6  # that are shown where no period was found


def records_json(records: Sequence[WatchRecord] | Sequence[RunRecord]) -> str:
    """All that was written, for programs: one entry for each process."""
    return json.dumps({"processes": [asdict(record) for record in records]}, indent=2)


def show_records(records: Sequence[WatchRecord], console: Console) -> None:
    """Print the page of the first process; of others only their peaks."""
    if not records:
        print_trimmed(console, "stowplan watch: torch was not imported, so there is nothing to observe")
        return
    show_record(records[0], console)
    if len(records) > 1:
        table = Table.grid(padding=(0, 2))
        for record in records:
            told = record.loop or record.told
            table.add_row(record.rank or "0", _figure(record.peaks[-1] if record.peaks else 0), told)
        print_section(console, "peaks of all processes", table)


def show_record(record: WatchRecord, console: Console) -> None:
    """Print the page of one process, section by section."""
    summary = Table.grid(padding=(0, 2))
    rows = _summary(record)
    for label, text in rows:
        summary.add_row(Text(label, "cyan"), text)
    print_section(console, f"stowplan watch: {basename(record.script) or 'python'}", summary)
    if record.failure is not None:
        alive = record.failure.alive
        print_section(console, f"alive then: {format_bytes(alive.nbytes)}", _bars(alive.kinds, console))
        print_section(console, "most of it", _places(alive.places))
    if record.so_far is not None:
        alive = record.so_far
        place = ", ".join(part for part in (alive.phase, alive.module, _where(alive.where)) if part)
        heading = f"alive when last written: {format_bytes(alive.nbytes)}, {place}"
        print_section(console, heading, _bars(alive.kinds, console))
        print_section(console, "most of it", _places(alive.places))
    if record.peak is not None:
        heading = f"the peak of an iteration: {format_bytes(record.peak.nbytes)} in {record.peak.phase}"
        print_section(console, heading, _bars(record.peak.kinds, console))
        print_section(console, "most of it, by line and module", _places(record.peak.places))
        print_section(console, "the most in each phase", _bars(record.phases, console))
        print_section(console, "between iterations", _growth(record))
    if record.findings:
        print_section(console, "without a plan", _findings(record.findings, record.peaks[-1]))


def _summary(record: WatchRecord) -> list[tuple[str, str]]:
    rows = []
    if failure := record.failure:
        place = ", ".join(
            part
            for part in (
                failure.alive.phase,
                failure.alive.module,
                _where(failure.alive.where),
                failure.op,
            )
            if part
        )
        rows += [("out of memory", f"{failure.error}: {failure.message}"), ("", place)]
    if record.loop:
        rows.append(("loop", record.loop))
        last = record.first + 2 * record.period - 1
        observed = (
            f"iterations {record.first} and {last}"
            if record.period == 1
            else f"steps {record.first} to {last}, two iterations of {record.period}"
        )
        rows.append(("observed", f"{observed}; then the hooks were removed"))
    elif record.so_far is not None:
        rows.append(("loop", "the script was killed before an iteration came twice"))
    elif record.told:
        rows.append(("loop", record.told))
        rows += [("", segment) for segment in record.segments[-_SEGMENTS:]]
    if record.evaluations:
        calls = "call" if record.evaluations == 1 else "calls"
        rows.append(("", f"{record.evaluations:,} {calls} without gradients meanwhile"))
    rows += [("note", note) for note in record.notes]
    if record.resident_bytes:
        rows.append(("process", f"{format_bytes(record.resident_bytes)} at most, with Python and libraries"))
    return rows


def _where(where: str) -> str:
    """The file without its folder, and the line."""
    return basename(where)


def _figure(nbytes: int) -> Text:
    return Text(format_bytes(nbytes), justify="right")


def _bars(shares: Sequence[PeakShare], console: Console) -> Table:
    table, blocks = Table.grid(padding=(0, 2)), blocks_of(console)
    most = max((share.nbytes for share in shares), default=0) or 1
    for share in shares:
        table.add_row(_figure(share.nbytes), share.what, Bar(share.nbytes / most, _BAR, blocks))
    return table


def _places(places: Sequence[CodePlace]) -> Table | None:
    if not places:
        return None
    shown, rest = places[:_LINES], places[_LINES:]
    rows = [(format_bytes(p.nbytes), f"x{p.count:,}" if p.count > 1 else "", p.kind) for p in shown]
    table = Table.grid(padding=(0, 2))
    for column, justify in enumerate(("right", "right", "left")):
        width = max(len(row[column]) for row in rows)
        table.add_column(justify="right" if justify == "right" else "left", min_width=width, no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for row, place in zip(rows, shown, strict=True):
        table.add_row(*row, Text(_source(place)))
        if place.module and place.file:
            table.add_row("", "", "", Text(place.module, "dim"))
    if rest:
        table.add_row(format_bytes(sum(place.nbytes for place in rest)), "", "", f"{len(rest)} more")
    return table


def _source(place: CodePlace) -> str:
    """The line with its text; without a line of the user's the module, or the op."""
    if not place.file:
        return place.module or place.op or "before observing"
    text = linecache.getline(place.file, place.line).strip()
    return f"{basename(place.file)}:{place.line}  {text}".rstrip()


def _growth(record: WatchRecord) -> RenderableType | None:
    first, second = record.peaks
    if first != second:
        told = f"the peak was {format_bytes(first)} in the first, {format_bytes(second)} in the second"
    else:
        told = "both had the same peak"
    table = Table.grid()
    table.add_row(told)
    if record.growth_bytes > 0:
        table.add_row(f"{format_bytes(record.growth_bytes)} more are alive after each iteration")
        places = _places(record.growth[:3])
        if places is not None:
            table.add_row(places)
    return table


def _findings(findings: Sequence[Remedy], peak_bytes: int) -> Table:
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        table.add_row(_figure(finding.nbytes), Text(finding.what))
        where = f"{_where(finding.where)}: " if finding.where else ""
        table.add_row("", f"{where}{finding.advice}")
        without = finding.peak_without_bytes
        if without is not None and without < peak_bytes:
            told = f"the peak would be {format_bytes(without)} instead of {format_bytes(peak_bytes)}"
            table.add_row("", told)
        elif without is not None:
            table.add_row("", "alone it does not lower the peak, which is at another moment")
    return table
