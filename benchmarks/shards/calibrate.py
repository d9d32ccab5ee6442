"""A machine file as workers here see it, all at work at once, and how far projections with it are off.

    python -m benchmarks.shards calibrate 2 machine.toml

The file is optional. Projected seconds of steps on this many workers are held against measured ones.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.nets import NETS
from benchmarks.shards.memory import differentiate
from benchmarks.shards.processes import on_workers
from stowplan.capture import capture
from stowplan.plan.pricing import Machine, price_by_roofline
from stowplan.plan.shards.mesh import parse_mesh
from stowplan.plan.shards.projection import Network, project
from stowplan.plan.shards.seeds import seeds_for
from stowplan.run.machine import measure_machine
from stowplan.run.shards.step import ShardedStep, ends_of
from stowplan.run.shards.workers import Workers

REFERENCE: dict[str, Any] = {"resolution": 316, "width": 16, "batch": 1}
ELEMENTS = [2**n for n in range(1, 22, 4)]
CHECKS = {
    2: (("unet", "data=2", 316), ("unet", "space=2", 316)),
    4: (("unet", "data=2,space=2", 316), ("unet", "space=2x2", 316)),
}
_TIMES = 5
Parcels = list[tuple[int, torch.Tensor]]


def median_seconds(work: Callable[[], object]) -> float:
    """Of several times, which all workers begin together."""
    times = []
    for _ in range(_TIMES):
        dist.barrier()
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return sorted(times)[_TIMES // 2]


def compute() -> Machine:
    """The roofline, lowered to what a step of the reference net reaches of it."""
    dist.barrier()
    peak = measure_machine(cache=None)
    model, args = NETS["unet"].build("real", **REFERENCE)
    differentiate(model, args)
    measured = median_seconds(lambda: differentiate(model, args))
    projected = sum(price_by_roofline(capture(model, args).graph, peak).seconds.values())
    reached = projected / measured
    return Machine(peak.macs_per_second * reached, peak.bytes_per_second * reached, peak.launch_seconds)


def network() -> Network:
    """Latency and bandwidth: the line through the seconds of exchanges with the next worker."""
    count = dist.get_world_size()
    workers = Workers(parse_mesh(f"space={count}"))
    ahead, behind = (workers.rank + 1) % count, (workers.rank - 1) % count
    seconds = []
    for elements in ELEMENTS:
        sends, receives = [(ahead, torch.zeros(elements))], [(behind, torch.zeros(elements))]
        seconds.append(median_seconds(partial(_swap, workers, sends, receives)))
    sizes = np.array([4.0 * elements for elements in ELEMENTS])
    weights = 1 / np.array(seconds)  # relative errors count
    slope, latency = np.polyfit(sizes, np.array(seconds), 1, w=weights)
    return Network(float(latency), float(1 / slope))


def _swap(workers: Workers, sends: Parcels, receives: Parcels) -> None:
    workers.swap(sends, receives)()


def calibrated() -> tuple[Machine, Network]:
    """Both, on one of several workers that all do the same."""
    return compute(), network()


def measured(name: str, mesh: str, resolution: int) -> float:
    """Seconds of a step on a mesh."""
    model, args = NETS[name].build("real", resolution=resolution, width=16, batch=2)
    step = ShardedStep(model, args, mesh=parse_mesh(mesh))
    shares, _ = step.share(*args)
    differentiate(step, shares)
    return median_seconds(lambda: differentiate(step, shares))


def projected(name: str, mesh: str, resolution: int, machine: Machine, wires: Network) -> float:
    """The same, by `simulate`."""
    captured = capture(*NETS[name].build("real", device="meta", resolution=resolution, width=16, batch=2))
    found, graph = parse_mesh(mesh), captured.graph
    return project(graph, found, seeds_for(graph, found), ends_of(captured), machine, wires).step_seconds


def text_of(machine: Machine, wires: Network) -> str:
    """What `stowplan simulate --machine` reads."""
    return (
        f"[compute]\nmacs_per_second = {machine.macs_per_second:.3e}\n"
        f"bytes_per_second = {machine.bytes_per_second:.3e}\n"
        f"launch_seconds = {machine.launch_seconds:.2e}\n\n"
        f"[network]\nlatency_seconds = {wires.latency_seconds:.2e}\n"
        f"bytes_per_second = {wires.bytes_per_second:.3e}\n"
    )


def main(words: Sequence[str]) -> None:
    """Measure, then write or check."""
    count = int(words[0]) if words else 2
    machine, wires = on_workers(count, calibrated)[0]
    print(text_of(machine, wires), flush=True)
    for file in words[1:]:
        Path(file).write_text(text_of(machine, wires), encoding="utf-8")
    for check in CHECKS[count]:
        found, told = max(on_workers(count, measured, *check)), projected(*check, machine, wires)
        print(
            f"{check[0]} {check[2]} on {check[1]}: measured {found:.3f} s, projected {told:.3f} s,"
            f" {told / found - 1:+.0%}",
            flush=True,
        )
