"""Real processes connected by gloo, each running the same function; what one raises is raised here.

They are forked from a server that has imported PyTorch once, so that many can be started and lost.
"""

import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context

from tests.support.workers.wires import Wires

PATIENCE_SECONDS = 600.0
_WARM = (
    "tests.support.nets",
    "stowplan.techniques.shards.run.fit",
    "torch._dynamo",
    "torch.export",
    "torch.distributed.checkpoint",
)


@dataclass(frozen=True, slots=True)
class Worker:
    """A process, and the pipe that it answers through: one for each, for one may die writing."""

    process: BaseProcess
    pipe: Connection

    def answer(self, patience: float = PATIENCE_SECONDS) -> Any:
        """What the worker's function returned."""
        assert self.pipe.poll(patience), "no answer"
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
    count: int,
    work: Callable[..., Any],
    *args: object,
    dying: frozenset[int] = frozenset(),
    patience: float = PATIENCE_SECONDS,
) -> list[Any]:
    """What `work(*args)` returns in each of `count` processes, by rank; those that die are not asked."""
    workers = started(count, work, *args, timeout=patience)
    try:
        return [worker.answer(patience) for rank, worker in enumerate(workers) if rank not in dying]
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


Work: TypeAlias = Callable[[], None]


@contextmanager
def two_processes(folder: Path) -> Iterator[Callable[[Work], None]]:
    """Within, calling with a function of a module runs it in both; what it raises there is raised here."""
    context = get_context("spawn")
    tasks: list[Queue[Work | None]] = [context.Queue() for _ in range(2)]
    answers: Queue[str | None] = context.Queue()
    workers = [
        context.Process(target=_serve_tasks, args=(rank, str(folder / "meeting"), task, answers), daemon=True)
        for rank, task in enumerate(tasks)
    ]
    for worker in workers:
        worker.start()

    def run(work: Work) -> None:
        for task in tasks:
            task.put(work)
        faults = [answers.get(timeout=PATIENCE_SECONDS) for _ in workers]
        assert not any(faults), "\n".join(filter(None, faults))

    yield run
    for task, worker in zip(tasks, workers, strict=True):
        task.put(None)
        worker.join(timeout=10)
        worker.kill()


def _serve_tasks(rank: int, meeting: str, tasks: "Queue[Work | None]", answers: "Queue[str | None]") -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    while (work := tasks.get()) is not None:
        try:
            work()
            answers.put(None)
        except BaseException:
            answers.put(traceback.format_exc())
    dist.destroy_process_group()
