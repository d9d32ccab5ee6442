"""A training step for people and machines: its inspection and the memory of its eager run."""

from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stowplan.report.inspect import show_inspection
from stowplan.report.inspect_json import inspection_json
from stowplan.report.terminal import Bar, blocks_of, print_trimmed
from stowplan.run.measure.inspect_step import StepInspection
from stowplan.run.optimizers import OptimizerShare
from stowplan.units import format_bytes

_BAR = 40


def step_json(found: StepInspection) -> dict[str, object]:
    """The inspection of the graph, with the eager step under `eager`."""
    return inspection_json(found.inspection) | {
        "eager": {
            "projected_peak_bytes": found.projected_peak_bytes,
            "measured_peak_bytes": found.measured_peak_bytes,
            "bytes_at_peak": {str(name): size for name, size in found.bytes_at_peak.items()},
            "estimated": found.estimated,
        },
        "optimizer": found.optimizer and asdict(found.optimizer),
        "training_peak_bytes": found.training_peak_bytes,
        "measured_training_peak_bytes": found.measured_training_peak_bytes,
    }


def show_step(found: StepInspection, console: Console, *, title: str, all_notes: bool = False) -> None:
    """The graph first, then the eager step by category."""
    show_inspection(found.inspection, console, title=title, all_notes=all_notes)
    blocks, table = blocks_of(console), Table.grid(padding=(0, 2))
    for category, size in sorted(found.bytes_at_peak.items(), key=lambda item: -item[1]):
        drawn = Bar(size / max(1, found.projected_peak_bytes), _BAR, blocks)
        table.add_row(str(category), Text(format_bytes(size), justify="right"), drawn)
    heading = Text(f"the eager step at its peak{' (estimated)' if found.estimated else ''}", "bold")
    print_trimmed(console, heading, Padding(table, (0, 0, 0, 2)), Padding(_peaks(found), (0, 0, 1, 2)))
    print_trimmed(console, *_over_the_graph(found))
    if found.optimizer and found.training_peak_bytes:
        told = _training(found.optimizer, found.training_peak_bytes)
        if found.measured_training_peak_bytes is not None:
            told += f", measured {found.measured_training_peak_bytes:,}"
        print_trimmed(console, Padding(told, (0, 0, 1, 2)))


def _training(share: OptimizerShare, peak_bytes: int) -> str:
    return (
        f"with {share.name} ({share.implementation}): {format_bytes(share.state_bytes)} of state,"
        f" {format_bytes(share.step_temporary_bytes)} more while it steps;"
        f" an iteration takes {format_bytes(peak_bytes)} ({peak_bytes:,} bytes)"
    )


def _peaks(found: StepInspection) -> str:
    projected = (
        f"projected peak {format_bytes(found.projected_peak_bytes)} ({found.projected_peak_bytes:,} bytes)"
    )
    if found.measured_peak_bytes is None:
        return projected
    apart = found.projected_peak_bytes / found.measured_peak_bytes - 1
    measured = f"{format_bytes(found.measured_peak_bytes)} ({found.measured_peak_bytes:,} bytes)"
    return f"{projected}, measured {measured}: {apart:+.2%}"


def _over_the_graph(found: StepInspection) -> Iterator[Padding]:
    """Why the eager step's peak is not the one that the graph's figures begin with."""
    more = found.projected_peak_bytes - found.inspection.facts.peak.bytes
    if more > 0:
        told = (
            f"{format_bytes(more)} more than the graph's peak above, which counts no workspace of kernels"
            " and frees each tensor after its last use"
        )
        yield Padding(told, (0, 0, 1, 2))
