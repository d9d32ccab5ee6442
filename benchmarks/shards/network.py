"""Latency and bandwidth of two workers, as `stowplan simulate` reads them."""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from benchmarks.shards.processes import on_workers
from stowplan.plan.shards.mesh import parse_mesh
from stowplan.run.shards.workers import Workers


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
            workers.swap([(1 - workers.rank, sent)], [(1 - workers.rank, got)])()
            times.append(time.perf_counter() - begun)
        seconds[elements] = sorted(times)[len(times) // 2]
    return seconds[2], 4 * 2**21 / (seconds[2**21] - seconds[2])


def main(_: Sequence[str]) -> None:
    """The table of a machine file."""
    latency, bandwidth = on_workers(2, network)[0]
    print(f"[network]\nlatency_seconds = {latency:.2e}\nbytes_per_second = {bandwidth:.2e}")
