"""A machine file as workers here see it, all at work at once, and how far projections with it are off.

    python -m benchmarks.shards calibrate 2 machine.toml

The file is optional. All is measured in rounds, by the same processes, the steps that are projected as well:
what else the machine does in that time is then in both.
"""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import truediv
from pathlib import Path
from statistics import fmean, median

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from stowplan.capture import capture
from stowplan.plan.prices import price_by_roofline
from stowplan.plan.pricing import Machine
from stowplan.run.cost.machine import measure_machine
from stowplan.techniques.shards.plan.mesh import parse_mesh
from stowplan.techniques.shards.plan.projection import Network, expected_most, project
from stowplan.techniques.shards.plan.seeds import seeds_for
from stowplan.techniques.shards.run.processes import MeshLike
from stowplan.techniques.shards.run.step import ShardedStep, ends_of
from stowplan.techniques.shards.run.workers import Workers
from tests.support.nets import NETS
from tests.support.workers.compared import differentiate
from tests.support.workers.processes import on_workers

SIZE = {"resolution": 316, "width": 16}
ROUNDS = 15
CHECKS = {2: ("data=2", "space=2"), 4: ("data=4", "data=2,space=2", "space=2x2")}
# Pieces of work of about a millisecond before a message, and the elements that it has.
MESSAGES = ((1, 0), (1, 1), (4, 0), (4, 1), (4, 2**16), (4, 2**19), (16, 0), (16, 1))
_REPEATS = 8
Rounds = dict[str, list[float]]


def step_on(mesh: MeshLike, batch: int) -> Callable[[], None]:
    """A step of the reference net, ready to be run."""
    model, args = NETS["unet"].build("real", batch=batch, **SIZE)  # type: ignore[arg-type]
    step = ShardedStep(model, args, mesh=mesh)
    shares, _ = step.share(*args)
    return partial(differentiate, step, shares)


class Messaging:
    """Pieces of work, with a message to the next worker after each group of them, or without messages."""

    def __init__(self, count: int) -> None:
        self._workers = Workers(parse_mesh(f"space={count}"))
        self._ahead, self._behind = ((self._workers.rank + way) % count for way in (1, -1))
        self._image, self._kernel = torch.randn(1, 32, 64, 64), torch.randn(32, 32, 3, 3)

    def run(self, pieces: int, elements: int) -> None:
        """Run `pieces` and send a message, several times; without `elements` nothing is sent."""
        parcel, room = torch.zeros(elements), torch.zeros(elements)
        for _ in range(_REPEATS):
            for _ in range(pieces):
                torch.conv2d(self._image, self._kernel)
            if elements:
                self._workers.swap([(self._ahead, parcel)], [(self._behind, room)])()


def rounds(count: int) -> Rounds:
    """Seconds of everything, round by round, on one of several workers that all do the same."""
    apart = init_device_mesh("cpu", (count, 1), mesh_dim_names=("apart", "data"))["data"]
    messaging = Messaging(count)
    work: dict[str, Callable[[], object]] = {"alone": step_on(apart, 1)}
    work |= {mesh: step_on(mesh, count) for mesh in CHECKS[count]}
    work |= {f"{p} {e}": partial(messaging.run, p, e) for p, e in MESSAGES}
    found: Rounds = {name: [] for name in work}
    for _ in range(ROUNDS + 1):
        for name, run in work.items():
            found[name].append(_timed(run))
    return {name: seconds[1:] for name, seconds in found.items()}


def _timed(run: Callable[[], object]) -> float:
    dist.barrier()
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def compute(alone: float, workers_per_core: float) -> Machine:
    """The roofline of a core, lowered to what a step of the reference net reaches of it."""
    peak = measure_machine(cache=None)
    graph = capture(*NETS["unet"].build("real", device="meta", batch=1, **SIZE)).graph  # type: ignore[arg-type]
    reached = sum(price_by_roofline(graph, peak).seconds.values()) / alone * workers_per_core
    return Machine(peak.macs_per_second * reached, peak.bytes_per_second * reached, peak.launch_seconds)


def network(took: Rounds, workers_per_core: float) -> Network:
    """Fitted to the seconds that a message adds to t: latency + bytes / bandwidth + sqrt(jitter * t) * the
    expected larger of two."""
    messages = [(p, e) for p, e in MESSAGES if e]
    added = np.array([_added(took[f"{p} {e}"], took[f"{p} 0"]) for p, e in messages])
    roots = [np.sqrt(median(took[f"{p} 0"]) / _REPEATS) for p, _ in messages]
    terms = np.array([[1.0, 4.0 * e, root] for (_, e), root in zip(messages, roots, strict=True)])
    latency, slope, root = _not_negative(terms, added)
    jitter = (root / expected_most(2)) ** 2
    return Network(latency, 1 / slope, jitter, workers_per_core)


def _added(messaging: Sequence[float], silent: Sequence[float]) -> float:
    """The seconds that one message adds, as the median of all rounds."""
    return median(one - other for one, other in zip(messaging, silent, strict=True)) / _REPEATS


def _not_negative(terms: np.ndarray, values: np.ndarray) -> list[float]:
    """Least squares of relative errors; a term that would be negative is left out."""
    weights = 1 / np.maximum(values, 1e-5)
    kept = list(range(terms.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(terms[:, kept] * weights[:, None], values * weights, rcond=None)
        if min(found) > 0:
            return [float(dict(zip(kept, found, strict=True)).get(n, 0.0)) for n in range(terms.shape[1])]
        kept.pop(int(np.argmin(found)))


def projected(mesh: str, batch: int, machine: Machine, wires: Network) -> float:
    """A step by `simulate`."""
    captured = capture(*NETS["unet"].build("real", device="meta", batch=batch, **SIZE))  # type: ignore[arg-type]
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
        f"jitter_seconds = {wires.jitter_seconds:.2e}\n"
        f"workers_per_core = {wires.workers_per_core:g}\n"
    )


def main(words: Sequence[str]) -> None:
    """Measure, write, and check."""
    count = int(words[0]) if words else 2
    sharing = max(1.0, count / len(os.sched_getaffinity(0)))
    found: Sequence[Rounds] = on_workers(count, rounds, count)
    usual, slowest = (_together(found, of) for of in (fmean, max))
    machine, wires = compute(median(usual["alone"]), sharing), network(usual, sharing)
    print(text_of(machine, wires), flush=True)
    for file in words[1:]:
        Path(file).write_text(text_of(machine, wires), encoding="utf-8")
    alone = median(usual["alone"])
    print(f"unet {SIZE['resolution']} alone, all at once: {alone:.3f} s")
    for mesh in CHECKS[count]:
        told = projected(mesh, count, machine, wires)
        took = alone * median(map(truediv, slowest[mesh], usual["alone"]))  # in one mood of the machine
        print(f"on {mesh}: measured {took:.3f} s, projected {told:.3f} s, {told / took - 1:+.0%}", flush=True)


def _together(found: Sequence[Rounds], of: Callable[[Sequence[float]], float]) -> Rounds:
    """Of all workers, round by round."""
    return {name: [of(each) for each in zip(*(one[name] for one in found), strict=True)] for name in found[0]}
