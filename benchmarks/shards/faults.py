"""Workers killed and stopped at random moments: how soon the others notice, and with which parameters."""

import argparse
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import get_context

from benchmarks.nets import NETS
from benchmarks.shards.memory import differentiate
from stowplan.errors import WorkerLost
from stowplan.plan.shards.mesh import parse_mesh
from stowplan.run.shards.step import ShardedStep


class Report(NamedTuple):
    """Steps done, a digest of the parameters, and the time."""

    kind: str
    done: int
    digest: float
    when: float


TIMEOUT_SECONDS = 4.0
"""How long a worker waits for another before it gives the step up."""


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


def _serve(rank: int, count: int, meeting: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=count, timeout=limit
    )
    train_forever(pipe.send)
    os._exit(0)  # whatever waits for the lost one is not waited for


def started(count: int) -> tuple[Sequence[BaseProcess], list[Connection]]:
    """Processes that train together, and a pipe from each."""
    context = get_context("spawn")
    meeting = f"{tempfile.mkdtemp()}/meeting"
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    workers = [
        context.Process(target=_serve, args=(rank, count, meeting, pipes[rank][1]), daemon=True)
        for rank in range(count)
    ]
    for worker in workers:
        worker.start()
    return workers, [pipe for pipe, _ in pipes]


def one_fault(count: int, how: signal.Signals, chance: random.Random) -> str:
    """Kill or stop one worker at a random moment; "" if all others noticed in time, between two steps."""
    workers, pipes = started(count)
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


def main(argv: Sequence[str]) -> None:
    """A line per fault, and how many went wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shards faults")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stops", type=int, default=4)
    asked = parser.parse_args(argv)
    chance = random.Random(0)
    for how, times in ((signal.SIGKILL, asked.kills), (signal.SIGSTOP, asked.stops)):
        faults = [one_fault(2 + 2 * (n % 2), how, chance) for n in range(times)]
        print(f"{how.name}: {times} times, {sum(map(bool, faults))} wrong", *filter(None, faults))
