"""The measurements of a run, next to the projections of its plan."""

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stowplan.plan.explain.updates import updates_of
from stowplan.plan.record import Record
from stowplan.report.terminal import print_trimmed
from stowplan.units import format_bytes, format_seconds


def record_json(record: Record) -> dict[str, object]:
    """The figures of a record for machines."""
    differing = [difference for difference in record.differences if difference.largest]
    return {
        "holds": record.holds,
        "exactness": record.plan.exactness,
        "allowed_bytes": record.plan.allowed_bytes,
        "projected_peak_bytes": record.plan.projected_peak_bytes,
        "measured_peak_bytes": record.measured_peak_bytes,
        "plain_measured_peak_bytes": record.plain_measured_peak_bytes,
        "projected_time_ratio": record.plan.time_ratio,
        "measured_time_ratio": record.measured_time_ratio,
        "measured_seconds": record.measured_seconds,
        "plain_measured_seconds": record.plain_measured_seconds,
        "compared": len(record.differences),
        "differing": {difference.tensor: difference.relative for difference in differing},
    }


def show_record(record: Record, console: Console, *, title: str) -> None:
    """The same for people."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="cyan")
    for heading in ("", "eager", "projected", "measured"):
        table.add_column(heading, justify="left" if not heading else "right")
    plan, plain = record.plan, record.plain_measured_peak_bytes
    table.add_row(
        "peak",
        format_bytes(plain) if plain else "-",
        format_bytes(plan.projected_peak_bytes),
        format_bytes(record.measured_peak_bytes),
    )
    ratio = record.measured_time_ratio
    table.add_row(
        "time",
        format_seconds(record.plain_measured_seconds) if record.plain_measured_seconds else "-",
        f"{plan.time_ratio:.3f} x",
        f"{ratio:.3f} x" if ratio else "-",
    )
    budget = f"budget {format_bytes(plan.allowed_bytes)}: " + (
        "held" if record.measured_peak_bytes <= plan.allowed_bytes else "BROKEN"
    )
    print_trimmed(console, Text(title, "bold"), Padding(table, (0, 0, 0, 2)), Padding(budget, (0, 0, 0, 2)))
    print_trimmed(console, Padding(_agreement(record), (0, 0, 1, 2)))


def _agreement(record: Record) -> str:
    differing = [difference for difference in record.differences if difference.largest]
    which = "optimizer state" if updates_of(record.plan.graph) else "gradients"
    results = f"loss, {which}, parameters" if record.plan.has_backward else "results, parameters"
    compared = f"{results}, buffers, draws: {len(record.differences)} compared"
    if not differing:
        return f"{compared}, all equal"
    worst = record.worst
    named = f"worst {worst.tensor}, {worst.relative:.1e} relative" if worst else ""
    beyond = sum(difference.largest > difference.allowed for difference in differing)
    if not beyond:
        return f"{compared}, {len(differing)} of them equal within rounding; {named}"
    return f"{beyond} of {len(record.differences)} compared DIFFER; {named}"
