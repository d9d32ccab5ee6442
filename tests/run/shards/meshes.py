"""Real processes connected by gloo, each running the same function; what one raises is raised here."""

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context

PATIENCE_SECONDS = 200


def on_workers(
    count: int, folder: Path, work: Callable[..., Any], *args: object, dying: frozenset[int] = frozenset()
) -> list[Any]:
    """What `work(*args)` returns in each of `count` processes, by rank; those that die are not waited for."""
    context = get_context("spawn")
    answers: Any = context.Queue()
    meeting = str(folder / f"meeting{len(os.listdir(folder))}")
    workers = [
        context.Process(target=_serve, args=(rank, count, meeting, answers, work, args), daemon=True)
        for rank in range(count)
    ]
    for worker in workers:
        worker.start()
    found: dict[int, Any] = {}
    try:
        for _ in range(count - len(dying)):
            rank, answer, fault = answers.get(timeout=PATIENCE_SECONDS)
            assert not fault, f"worker {rank}: {fault}"
            found[rank] = answer
    finally:
        for worker in workers:
            worker.join(timeout=10)
            worker.kill()
    return [found[rank] for rank in sorted(found)]


def _serve(rank: int, count: int, meeting: str, answers: Any, work: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)
        answers.put((rank, work(*args), ""))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
    finally:
        dist.destroy_process_group()
