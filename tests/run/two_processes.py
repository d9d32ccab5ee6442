"""Two processes connected by gloo, started once and then given one piece of work after another."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context

Work: TypeAlias = Callable[[], None]
PATIENCE_SECONDS = 240


@contextmanager
def two_processes(folder: Path) -> Iterator[Callable[[Work], None]]:
    """Within, calling with a function of a module runs it in both; what it raises there is raised here."""
    context = get_context("spawn")
    tasks: list[Queue[Work | None]] = [context.Queue() for _ in range(2)]
    answers: Queue[str | None] = context.Queue()
    workers = [
        context.Process(target=_serve, args=(rank, str(folder / "meeting"), task, answers), daemon=True)
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


def _serve(rank: int, meeting: str, tasks: "Queue[Work | None]", answers: "Queue[str | None]") -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    while (work := tasks.get()) is not None:
        try:
            work()
            answers.put(None)
        except BaseException:
            answers.put(traceback.format_exc())
    dist.destroy_process_group()
