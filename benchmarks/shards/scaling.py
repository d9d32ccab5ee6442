"""Weak scaling: a batch of one per worker, on one and on two workers."""

import time
from collections.abc import Sequence

import torch.distributed as dist

from benchmarks.nets import NETS
from benchmarks.results import Study
from benchmarks.shards.memory import differentiate
from benchmarks.shards.processes import on_workers
from stowplan.plan.shards.mesh import parse_mesh
from stowplan.run.shards.step import ShardedStep


def scaling(mesh: str, batch: int) -> float:
    """Seconds of a U-Net's step, the fastest of several."""
    model, args = NETS["unet"].build("real", resolution=316, width=16, batch=batch)
    step = ShardedStep(model, args, mesh=parse_mesh(mesh))
    shares, _ = step.share(*args)
    best = float("inf")
    for _ in range(6):
        dist.barrier()
        started = time.perf_counter()
        differentiate(step, shares)
        best = min(best, time.perf_counter() - started)
    return best


def main(_: Sequence[str]) -> None:
    """A line per mesh of two."""
    alone = max(on_workers(1, scaling, "data=1", 1))
    for mesh in ("data=2", "space=2"):
        pair = max(on_workers(2, scaling, mesh, 2))
        print(f"one worker {alone:.3f} s, {mesh} with two images {pair:.3f} s: {alone / pair:.3f}")
        Study("shards").tell(f"unet on {mesh}, an image each", "two workers", "efficiency", alone / pair, "")
