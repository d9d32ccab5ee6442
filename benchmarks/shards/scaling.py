"""Weak scaling: an image per worker, on one worker and on two, beside what the machine itself allows.

Two processes that have nothing to do with each other slow each other down where they share a core's units,
its caches and the way to memory: what they reach together is the most that any two workers can.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.nets import NETS
from benchmarks.results import Study
from benchmarks.shards.memory import differentiate
from benchmarks.shards.processes import on_workers
from stowplan.run.shards.processes import MeshLike
from stowplan.run.shards.step import ShardedStep

ROUNDS = 25
MESHES = ("data=2", "space=2")


def step_on(mesh: MeshLike, batch: int) -> Callable[[], None]:
    """A U-Net's step on a mesh, ready to be run again and again."""
    model, args = NETS["unet"].build("real", resolution=316, width=16, batch=batch)
    step = ShardedStep(model, args, mesh=mesh)
    shares, _ = step.share(*args)

    def run() -> None:
        model.zero_grad()
        differentiate(step, shares)

    return run


def nothing() -> None:
    """What a worker does while another has the machine for itself."""


def in_turns() -> dict[str, list[float]]:
    """This worker's seconds by what it does, in rounds, so that all meet the same moods of the machine."""
    apart = init_device_mesh("cpu", (2, 1), mesh_dim_names=("apart", "data"))["data"]
    single = step_on(apart, 1)
    work = {"alone": nothing if dist.get_rank() else single, "apart": single}
    work |= {mesh: step_on(mesh, 2) for mesh in MESHES}
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(ROUNDS):
        for name, run in work.items():
            seconds[name].append(_seconds_of(run))
    return seconds


def _seconds_of(run: Callable[[], None]) -> float:
    dist.barrier()
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def efficiency(seconds: dict[str, list[float]], of: str, against: str) -> float:
    """The median over rounds."""
    return median(one / other for one, other in zip(seconds[against], seconds[of], strict=True))


def main(_: Sequence[str]) -> None:
    """A line per mesh of two."""
    found = on_workers(2, in_turns)
    seconds = {name: list(map(max, *(each[name] for each in found))) for name in found[0]}
    bound = efficiency(seconds, "apart", "alone")
    tell = partial(Study("shards").tell, unit="")
    print(f"one worker {median(seconds['alone']):.3f} s; two that have nothing in common: {bound:.3f}")
    tell("unet, an image each", "two processes apart", "efficiency", bound)
    for mesh in MESHES:
        reached, relative = (efficiency(seconds, mesh, against) for against in ("alone", "apart"))
        print(f"{mesh}: {median(seconds[mesh]):.3f} s, {reached:.3f}; {relative:.3f} of what two apart reach")
        tell(f"unet on {mesh}, an image each", "two workers", "efficiency", reached)
        tell(f"unet on {mesh}, an image each", "two workers", "efficiency against two apart", relative)
