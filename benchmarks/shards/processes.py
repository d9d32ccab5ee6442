"""Real processes connected by gloo, each running the same function; what one raises is raised here.

They are forked from a server that has imported PyTorch once, so that many can be started and lost.
"""

import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context

from benchmarks.shards.wires import Wires

PATIENCE_SECONDS = 280.0
_WARM = (
    "benchmarks.nets",
    "stowplan.run.shards.fit",
    "torch._dynamo",
    "torch.export",
    "torch.distributed.checkpoint",
)


@dataclass(frozen=True, slots=True)
class Worker:
    """A process, and the pipe that it answers through: one for each, for one may die writing."""

    process: BaseProcess
    pipe: Connection

    def answer(self) -> Any:
        """What the worker's function returned."""
        assert self.pipe.poll(PATIENCE_SECONDS), "no answer"
        answer, fault = self.pipe.recv()
        assert not fault, fault
        return answer

    def end(self) -> None:
        self.process.join(timeout=10)
        self.process.kill()
        self.process.join()
        self.pipe.close()


def started(
    count: int,
    work: Callable[..., Any],
    *args: object,
    timeout: float = PATIENCE_SECONDS,
    wires: Wires | None = None,
) -> list[Worker]:
    """Processes at the same work, of which each waits `timeout` seconds for another."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(_WARM))
    meeting = wires.meeting if wires else f"file://{tempfile.mkdtemp()}/meeting"
    workers = []
    for rank in range(count):
        pipe, end = context.Pipe(duplex=False)
        serving = (rank, count, meeting, timeout, wires, end, work, args)
        process = context.Process(target=_serve, args=serving, daemon=True)
        process.start()
        end.close()
        workers.append(Worker(process, pipe))
    return workers


def on_workers(
    count: int, work: Callable[..., Any], *args: object, dying: frozenset[int] = frozenset()
) -> list[Any]:
    """What `work(*args)` returns in each of `count` processes, by rank; those that die are not asked."""
    workers = started(count, work, *args)
    try:
        return [worker.answer() for rank, worker in enumerate(workers) if rank not in dying]
    finally:
        for worker in workers:
            worker.end()


def _serve(
    rank: int,
    count: int,
    meeting: str,
    timeout: float,
    wires: Wires | None,
    pipe: Connection,
    work: Callable[..., Any],
    args: tuple[object, ...],
) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    try:
        if wires:
            wires.enter(rank)
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count, timeout=limit)
        pipe.send((work(*args), ""))
        with suppress(RuntimeError):  # who finds another gone has nothing left to say
            dist.barrier()
    except BaseException:
        pipe.send((None, f"worker {rank}: {traceback.format_exc()}"))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
