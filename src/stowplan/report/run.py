"""A script that ran within a budget: what was planned, and the projected and the measured peak beside it."""

from collections.abc import Sequence
from os.path import basename

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stowplan.observe.record import ModuleFigures, PlanFigures, RunRecord
from stowplan.report.terminal import print_section, print_trimmed
from stowplan.units import format_bytes


def show_runs(records: Sequence[RunRecord], console: Console) -> None:
    """Print what the first process did; of others only their peaks."""
    if not records:
        print_trimmed(console, "stowplan run: torch was not imported, so nothing was planned")
        return
    show_run(records[0], console)
    if len(records) > 1:
        table = Table.grid(padding=(0, 2))
        for record in records:
            table.add_row(record.rank or "0", _measured(record))
        print_section(console, "measured peaks of all processes", table)


def show_run(record: RunRecord, console: Console) -> None:
    """Print the page of one process."""
    summary = Table.grid(padding=(0, 2))
    rows = [("budget", format_bytes(record.budget_bytes)), ("measured", _measured(record))]
    if record.told:
        rows = [("nothing done", record.told)]
    for label, text in rows:
        summary.add_row(Text(label, "cyan"), text)
    print_section(console, f"stowplan run: {basename(record.script) or 'python'}", summary)
    for module in record.modules:
        print_section(console, module.name, _module(module))


def _measured(record: RunRecord) -> str:
    """The largest peak, and whether an iteration took more than the budget."""
    peaks = record.peaks
    if not peaks:
        return "nothing: no optimizer stepped"
    steps = "step" if len(peaks) == 1 else f"{len(peaks)} steps"
    text = f"{format_bytes(max(peaks))} at most until the {'first' if len(peaks) == 1 else 'last'} of {steps}"
    over = [number for number, peak in enumerate(peaks, 1) if peak > record.budget_bytes]
    if over:
        text += f"; more than the budget before step {', '.join(map(str, over))}"
    return text


def _module(module: ModuleFigures) -> Table:
    table = Table.grid(padding=(0, 2))
    for plan in module.plans:
        table.add_row("planned", _plan(plan))
    if module.plans:
        table.add_row("beside it", f"{format_bytes(module.beside_bytes)} of the budget are kept for the rest")
    for refusal in module.refusals:
        table.add_row("not planned", refusal)
    return table


def _plan(plan: PlanFigures) -> str:
    projected, eager = format_bytes(plan.projected_peak_bytes), format_bytes(plan.eager_peak_bytes)
    return (
        f"{projected} projected instead of {eager}, {plan.time_ratio:.2f} of eager's time, {plan.exactness}"
        f" ({plan.shapes})"
    )
