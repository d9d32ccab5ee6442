"""A simulated mesh for people: its figures, what was gathered and why, and a curve of larger meshes."""

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stowplan.plan.shards.projection import Projection
from stowplan.report.terminal import print_trimmed
from stowplan.units import format_bytes, format_seconds

_INDENT = 2


def show_projection(target: str, wanted: Projection, curve: Sequence[Projection], console: Console) -> None:
    """Print the mesh that was asked for, then the curve."""
    alone = curve[0].step_seconds
    title = f"{target} on {wanted.mesh}: {wanted.mesh.size:,} workers"
    print_trimmed(console, Text(title, "bold"))
    print_trimmed(console, Padding(_table([wanted], alone), (0, 0, 1, _INDENT)))
    for op, why in wanted.gathered.items():
        print_trimmed(console, Padding(Text(f"gathered before {op}: {why}", "dim"), (0, 0, 0, _INDENT)))
    print_trimmed(console, Text("the same step on more workers", "bold"))
    print_trimmed(console, Padding(_table(curve, alone), (0, 0, 1, _INDENT)))


def _table(rows: Sequence[Projection], alone_seconds: float) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="cyan")
    for heading in ("workers", "step", "network", "efficiency", "sent", "summed", "peak", "planned in"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row.mesh.size:,}",
            format_seconds(row.step_seconds),
            format_seconds(row.network_seconds),
            f"{row.efficiency(alone_seconds):.1%}",
            format_bytes(row.sent_bytes),
            format_bytes(row.summed_bytes),
            format_bytes(row.peak_bytes),
            format_seconds(row.planning_seconds),
        )
    return table
