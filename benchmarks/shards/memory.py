"""Peaks above parameters and gradients: of one process, and of each worker of a 2 x 2 mesh."""

from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.results import Study
from stowplan.run.measure.measure import measure
from stowplan.techniques.shards.plan.mesh import parse_mesh
from stowplan.techniques.shards.run.step import ShardedStep
from tests.support.nets import NETS
from tests.support.workers.compared import differentiate
from tests.support.workers.processes import on_workers

MEMORY = {
    "unet": {"resolution": 412, "width": 8},
    # Of a single small image, PyTorch's convolutions on the CPU unfold copies; with two they do not.
    "unet3d": {"batch": 2, "resolution": 64, "width": 8, "levels": 3, "channels": 4, "classes": 4},
}


def bytes_of(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def peak_above(step: Callable[[], object], model: nn.Module, args: tuple[Tensor, ...]) -> int:
    """The step's peak above parameters and their gradients."""
    before = [*args, *model.parameters(), *model.buffers()]
    return measure(step, before=before).measured_peak_bytes - 2 * bytes_of(model)


def memory(name: str) -> tuple[int, int, int]:
    """Peaks above parameters and gradients, of one process and of this worker, and what it sent."""
    model, args = NETS[name].build("real", **MEMORY[name])  # type: ignore[arg-type]
    alone = peak_above(partial(differentiate, model, args), model, args) if dist.get_rank() == 0 else 0
    model.zero_grad()
    sharded = ShardedStep(model, args, mesh=parse_mesh("space=2x2"))
    shares, _ = sharded.share(*args)
    del args
    peak = peak_above(partial(differentiate, sharded, shares), model, shares)
    return alone, peak, sharded.workers.sent_bytes


def main(_: Sequence[str]) -> None:
    """A line per net and worker."""
    for name in MEMORY:
        found = on_workers(4, memory, name)
        alone = found[0][0]
        study, case = Study("shards"), f"{name} on 2 x 2 workers"
        study.tell(case, "one process", "peak", alone, "B")
        for rank, (_, peak, sent) in enumerate(found):
            print(f"{name} worker {rank}: {peak:,} of {alone:,} bytes, {peak / alone:.3f}; sent {sent:,}")
            study.tell(case, f"worker {rank}", "peak", peak, "B")
            study.tell(case, f"worker {rank}", "share", peak / alone, "of one process")
            study.tell(case, f"worker {rank}", "sent", sent, "B")
