"""A step on a card that is not here: its peak, and why it differs from the CPU's."""

from dataclasses import asdict

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stowplan.plan.cards import PeakOnCard
from stowplan.report.terminal import INDENT, print_trimmed
from stowplan.units import format_bytes


def show_card(peak: PeakOnCard, console: Console) -> None:
    """Print the peak of requested bytes without a plan, cause by cause from the CPU's to the card's."""
    card = peak.card
    table = Table.grid(padding=(0, 2))
    table.add_row(_right(format_bytes(peak.here_peak_bytes)), "as captured for this CPU")
    for difference in peak.differences:
        sign = "-" if difference.peak_bytes < 0 else "+"
        calls = f" ({difference.calls} calls)" if difference.calls else ""
        table.add_row(_right(sign + format_bytes(abs(difference.peak_bytes))), difference.cause + calls)
    table.add_row(_right(format_bytes(peak.peak_bytes)), f"on {card.name}")
    memory = f"{format_bytes(card.usable_bytes)} of {format_bytes(card.memory_bytes)} usable"
    heading = Text(f"peak without a plan on {card.name}, projected: nothing ran on it ({memory})", "bold")
    notes = Text("\n".join(peak.notes), "dim")
    print_trimmed(console, heading, Padding(table, (0, 0, 0, INDENT)), Padding(notes, (0, 0, 1, INDENT)))


def _right(text: str) -> Text:
    return Text(text, "cyan", justify="right")


def card_json(peak: PeakOnCard) -> dict[str, object]:
    """What `--device --json` prints under `device`."""
    return {
        "card": peak.card.id,
        "name": peak.card.name,
        "projected": True,
        "memory_bytes": peak.card.memory_bytes,
        "usable_bytes": peak.card.usable_bytes,
        "cpu_peak_bytes": peak.here_peak_bytes,
        "peak_bytes": peak.peak_bytes,
        "lasting_bytes": peak.lasting_bytes,
        "differences": [asdict(difference) for difference in peak.differences],
        "notes": list(peak.notes),
    }
