"""Steps over meshes of real processes on this machine: memory per worker, weak scaling, lost workers.

python -m benchmarks.shards memory     peak per worker of a 2 x 2 mesh over that of one process
python -m benchmarks.shards scaling    a batch of one per worker, on one and on two workers
python -m benchmarks.shards network    latency and bandwidth of two workers, as `simulate` reads them
python -m benchmarks.shards faults 20 4     so many workers killed, so many stopped, at random moments
"""

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import get_context

from benchmarks.nets import NETS
from stowplan.errors import WorkerLost
from stowplan.plan.shards.mesh import parse_mesh
from stowplan.run.measure import measure
from stowplan.run.shards.step import ShardedStep
from stowplan.run.shards.workers import Workers

MEMORY = {
    "unet": {"resolution": 412, "width": 8},
    # Of a single small image, PyTorch's convolutions on the CPU unfold copies; with two they do not.
    "unet3d": {"batch": 2, "resolution": 64, "width": 8, "levels": 3, "channels": 4, "classes": 4},
}


class Report(NamedTuple):
    """Steps done, a digest of the parameters, and the time."""

    kind: str
    done: int
    digest: float
    when: float


TIMEOUT_SECONDS = 4.0
"""How long a worker waits for another before it gives the step up."""


def bytes_of(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def peak_above(step: Callable[[], object], model: nn.Module, args: tuple[Tensor, ...]) -> int:
    """The step's peak above parameters and their gradients."""
    before = [*args, *model.parameters(), *model.buffers()]
    return measure(step, before=before).measured_peak_bytes - 2 * bytes_of(model)


def differentiate(step: Callable[..., object], args: tuple[Tensor, ...]) -> None:
    loss = step(*args)
    assert isinstance(loss, Tensor)
    loss.backward()  # type: ignore[no-untyped-call]


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


def network() -> tuple[float, float]:
    """Seconds of a small exchange both ways, and bytes per second of a large one."""
    workers = Workers(parse_mesh("space=2"))
    seconds = {}
    for elements in (2, 2**21):
        sent, got = torch.zeros(elements), torch.zeros(elements)
        times = []
        for _ in range(20):
            dist.barrier()
            begun = time.perf_counter()
            workers.swap([(1 - workers.rank, sent)], [(1 - workers.rank, got)])
            times.append(time.perf_counter() - begun)
        seconds[elements] = sorted(times)[len(times) // 2]
    return seconds[2], 4 * 2**21 / (seconds[2**21] - seconds[2])


def train_forever(tell: Callable[[object], None]) -> None:
    """Steps of a small net until a worker is lost; then what was noticed, when, and with which parameters."""
    model, args = NETS["unet"].build("tiny", resolution=204)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = ShardedStep(model, args, mesh=parse_mesh(f"space={dist.get_world_size()}"))
    shares, _ = step.share(*args)
    done, before = 0, digest_of(model)
    try:
        while True:
            optimizer.zero_grad()
            differentiate(step, shares)
            optimizer.step()
            done, before = done + 1, digest_of(model)
            tell(Report("step", done, before, time.time()))
    except WorkerLost as lost:
        whole = lost.step == done + 1 and digest_of(model) == before
        tell(Report("lost" if whole else "half a step", done, before, time.time()))


def digest_of(model: nn.Module) -> float:
    return sum(float(parameter.detach().double().sum()) for parameter in model.parameters())


def _serve(
    rank: int, count: int, meeting: str, work: Callable[..., Any], args: Any, pipe: Connection
) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=TIMEOUT_SECONDS if work is train_forever else 280)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=count, timeout=limit
    )
    if work is train_forever:
        train_forever(pipe.send)
        os._exit(0)  # whatever waits for the lost one is not waited for
    pipe.send(work(*args))
    dist.barrier()
    dist.destroy_process_group()


def started(
    count: int, work: Callable[..., Any], *args: object
) -> tuple[Sequence[BaseProcess], list[Connection]]:
    """Processes connected by gloo, each at the same work, and a pipe from each, for one may die writing."""
    context = get_context("spawn")
    meeting = f"{tempfile.mkdtemp()}/meeting"
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    workers = [
        context.Process(target=_serve, args=(rank, count, meeting, work, args, pipes[rank][1]), daemon=True)
        for rank in range(count)
    ]
    for worker in workers:
        worker.start()
    return workers, [pipe for pipe, _ in pipes]


def on_workers(count: int, work: Callable[..., Any], *args: object) -> list[Any]:
    """What each process found, by rank."""
    workers, pipes = started(count, work, *args)
    found = [pipe.recv() for pipe in pipes]
    for worker in workers:
        worker.join(timeout=20)
    return found


def one_fault(count: int, how: signal.Signals, chance: random.Random) -> str:
    """Kill or stop one worker at a random moment; "" if all others noticed in time, between two steps."""
    workers, pipes = started(count, train_forever)
    for pipe in pipes:
        while pipe.recv().done < 2:
            pass
    time.sleep(chance.random() * 0.4)
    victim, hit = chance.randrange(count), time.time()
    os.kill(workers[victim].pid or 0, how)
    told = [_last(pipe) for rank, pipe in enumerate(pipes) if rank != victim]
    os.kill(workers[victim].pid or 0, signal.SIGKILL)
    for worker in workers:
        worker.join(timeout=10)
    limit = 5.0 if how is signal.SIGKILL else TIMEOUT_SECONDS + 1
    late = max(report.when for report in told) - hit
    alike = len({(report.done, report.digest) for report in told}) == 1
    fine = late <= limit and alike and all(report.kind == "lost" for report in told)
    print(f"{how.name} {count} workers: {late:.2f} s", told if not fine else "", flush=True)
    return "" if fine else f"{how.name} of {victim}: {late:.2f} s, {told}"


def _last(pipe: Connection) -> Report:
    """The report that a worker ends with."""
    while True:
        report: Report = pipe.recv()
        if report.kind != "step":
            return report


def main() -> None:
    """Run what is asked for and print it."""
    match sys.argv[1:]:
        case ["memory"]:
            for name in MEMORY:
                found = on_workers(4, memory, name)
                alone = found[0][0]
                for rank, (_, peak, sent) in enumerate(found):
                    told = f"{peak:,} of {alone:,} bytes, {peak / alone:.3f}; sent {sent:,}"
                    print(f"{name} worker {rank}: {told}")
        case ["scaling"]:
            alone = max(on_workers(1, scaling, "data=1", 1))
            for mesh in ("data=2", "space=2"):
                pair = max(on_workers(2, scaling, mesh, 2))
                print(f"one worker {alone:.3f} s, {mesh} with two images {pair:.3f} s: {alone / pair:.3f}")
        case ["network"]:
            latency, bandwidth = on_workers(2, network)[0]
            print(f"[network]\nlatency_seconds = {latency:.2e}\nbytes_per_second = {bandwidth:.2e}")
        case ["faults", kills, stops]:
            chance = random.Random(0)
            for how, times in ((signal.SIGKILL, int(kills)), (signal.SIGSTOP, int(stops))):
                faults = [one_fault(2 + 2 * (n % 2), how, chance) for n in range(times)]
                print(f"{how.name}: {times} times, {sum(map(bool, faults))} wrong", *filter(None, faults))
        case _:
            print(__doc__)


if __name__ == "__main__":
    main()
