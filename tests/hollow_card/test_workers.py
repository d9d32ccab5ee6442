"""`fit(mesh=...)` with two workers on the hollow card, over gloo: gradients and bytes of one process."""

import multiprocessing
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stowplan import Search, fit, plans_of, shards_of
from tests.hollow_card.measuring import kept_by_cublas, trained
from tests.hollow_card.nets import Transformer

_SECONDS = 600  # two processes that each import PyTorch, on a busy machine
_CLOSE = 1e-4
_BESIDE = 4096  # bytes of numbers that workers exchange


class Images(nn.Module):
    """Convolutions, and a norm over the batch or over groups of channels."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
        )
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, image: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.layers(image)), wanted)


def images(norm: Callable[[], nn.Module]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Images(norm()), (torch.randn(4, 3, 16, 16), torch.randint(0, 2, (4, 16, 16)))


def words() -> tuple[nn.Module, tuple[Tensor, ...]]:
    given = torch.randint(0, 200, (4, 64))
    return Transformer(drop=0.0), (given, given)


CASES: dict[str, tuple[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]]] = {
    "data": ("data=2", words),
    "sequence": ("sequence=2", words),
    "model": ("model=2", words),
    "data with batch norm": ("data=2", lambda: images(lambda: nn.BatchNorm2d(8))),
    "space with batch norm": ("space=2", lambda: images(lambda: nn.BatchNorm2d(8))),
    "space with group norm": ("space=2", lambda: images(lambda: nn.GroupNorm(2, 8))),
    "data with instance norm": ("data=2", lambda: images(lambda: nn.InstanceNorm2d(8, affine=True))),
}


def _worker(rank: int, port: int, case: str, told: Any) -> None:
    """One of the two workers; tells how far its gradients are from one process, and its bytes."""
    store = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    mesh, make = CASES[case]
    torch.manual_seed(0)
    model, args = make()
    alone = trained(model.cuda(), tuple(arg.cuda() for arg in args)).values
    torch.manual_seed(0)
    model, args = make()
    there = tuple(arg.cuda() for arg in args)
    model, kept = model.cuda(), kept_by_cublas()
    fitted = fit(model, there, budget="1GiB", mesh=mesh, search=Search(gap=0.5, moves=20))
    own, _ = shards_of(fitted).share(*there)
    del there
    run = trained(fitted, own)
    worst = max(float((a - b).abs().max()) for a, b in zip(run.values, alone, strict=True))
    told.put((rank, worst, run.requested_bytes - kept - plans_of(fitted)[0].projected_peak_bytes))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("case", CASES)
def test_two_workers_compute_the_gradients_of_one_process(case: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    told: Any = context.Queue()
    workers = [context.Process(target=_worker, args=(rank, port, case, told)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(_SECONDS)
    codes = [worker.exitcode for worker in workers]
    for worker in workers:
        worker.kill()
    assert codes == [0, 0]
    for _, worst, beyond in (told.get(timeout=1) for _ in workers):
        assert worst < _CLOSE
        assert 0 <= beyond <= _BESIDE
