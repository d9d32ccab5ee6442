"""Budgets below what a worker's part of the step takes as it comes: what each worker really took."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.results import Study
from benchmarks.shards.memory import MEMORY
from tests.support.nets import NETS
from tests.support.workers.budgets import Part, Taken, within_budgets
from tests.support.workers.processes import on_workers

BELOW = {"unet": 0.8, "unet3d": 0.9}
"""Of the smallest budget without tiles: one that takes some. What norms over workers read is always whole."""


def budgets_of(net: str, size: Any, settings: dict[str, Any], mesh: str) -> list[Taken]:
    """The same of a net by its name."""
    return within_budgets(Part(*NETS[net].build(size, **settings), mesh), (BELOW[net],))


def _lines(net: str, mesh: str, found: list[list[Taken]]) -> Iterator[str]:
    for rank, taken in enumerate(found):
        for each in taken:
            told = "kept" if each.is_kept else "NOT KEPT"
            yield (
                f"{net} on {mesh}, worker {rank}: plain {each.plain_bytes:,}, allowed {each.allowed_bytes:,},"
                f" projected {each.projected_bytes:,}, measured {each.measured_bytes:,}, segments in tiles"
                f" {each.tiled}, {each.longer:.2f} of the time, gradients {each.far:.1e} apart: {told}"
            )
            share = each.measured_bytes / each.allowed_bytes
            case = f"{net} on {mesh}, {each.allowed_bytes / each.plain_bytes:.2f} of the baseline's peak"
            Study("shards").tell(case, f"worker {rank}", "measured", share, "of the budget")


def main(_: Sequence[str]) -> None:
    """A line per mesh, net, worker and budget."""
    for mesh, workers in (("space=2", 2), ("space=2x2", 4)):
        for net, settings in MEMORY.items():
            found = on_workers(workers, budgets_of, net, "real", settings, mesh)
            print("\n".join(_lines(net, mesh, found)), flush=True)
