"""A simulated mesh for people: its figures, gathered tensors with reasons, and scaling curves."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stowplan.report.terminal import INDENT, print_trimmed, table_or_lists
from stowplan.techniques.shards.plan.projection import MeshProjection
from stowplan.units import format_bytes, format_seconds

_HEADINGS = ("workers", "mesh", "step", "network", "efficiency", "sent", "summed", "peak")
_NARROW = 90  # columns: below, one blank has to do between two figures


def show_projections(
    target: str,
    wanted: MeshProjection,
    strong: Sequence[MeshProjection],
    weak: Sequence[MeshProjection],
    stages: Mapping[str, str],
    console: Console,
) -> None:
    """Print the mesh that was asked for, then the same step and a growing batch on more workers."""
    alone = strong[0].step_seconds
    title = f"{target} on {wanted.mesh}: {wanted.mesh.size:,} workers"
    _show_table(title, [wanted], [wanted.efficiency(alone)], console)
    for op, why in wanted.gathered.items():
        print_trimmed(console, Padding(Text(f"gathered before {op}: {why}", "dim"), (0, 0, 0, INDENT)))
    for op, state in stages.items():
        print_trimmed(console, Padding(Text(f"from {op} on: {state}", "dim"), (0, 0, 0, INDENT)))
    _show_table("the same step on more workers", strong, [p.efficiency(alone) for p in strong], console)
    if weak:
        efficiencies = [weak[0].step_seconds / projection.step_seconds for projection in weak]
        _show_table("a batch that grows with the workers", weak, efficiencies, console)


def _show_table(
    title: str, rows: Sequence[MeshProjection], efficiencies: Sequence[float], console: Console
) -> None:
    gap = 1 if console.width < _NARROW else 2
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="cyan")
    for heading in _HEADINGS:
        is_mesh = heading == "mesh"
        table.add_column(
            heading, justify="left" if is_mesh else "right", no_wrap=not is_mesh, overflow="fold"
        )
    for row, efficiency in zip(rows, efficiencies, strict=True):
        table.add_row(
            f"{row.mesh.size:,}",
            str(row.mesh).replace(",", " "),  # so that lines can be broken between axes
            format_seconds(row.step_seconds),
            format_seconds(row.network_seconds + row.waiting_seconds),
            f"{efficiency:.1%}",
            format_bytes(row.sent_bytes),
            format_bytes(row.summed_bytes),
            format_bytes(row.peak_bytes),
        )
    seconds = format_seconds(max(row.planning_seconds for row in rows))
    size = format_bytes(max(row.planner_bytes for row in rows))
    planned = f"planned in {seconds} with {size}" + (" at most, each" if len(rows) > 1 else "")
    print_trimmed(console, Text(title, "bold"))
    fitting = table_or_lists(table, console, console.width - INDENT)
    print_trimmed(console, Padding(fitting, (0, 0, 0, INDENT)))
    print_trimmed(console, Padding(Text(planned, "dim"), (0, 0, 1, INDENT)))
