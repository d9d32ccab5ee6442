"""Training on several workers, each within its own budget, that continues after one of them is lost.

torchrun --standalone --nproc-per-node 2 --max-restarts 2 -m examples.several_workers FOLDER

`--lose-worker-in 4` kills a worker in the middle of the fourth step, to see torchrun start all of them again.
`stowplan report FOLDER/*.plan.json -o workers.html` shows the plans of the workers side by side.
"""

import argparse
import hashlib
import os
import signal
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

import stowplan
from examples.training_script import Network
from stowplan import Checkpoints, Search

STEPS = 6


def train(folder: Path, budget: str, lost_in: int = 0) -> str:
    """Continue from the newest checkpoint in the folder and return a digest of the final parameters."""
    torch.manual_seed(0)
    images, labels = torch.randn(4, 3, 64, 64), torch.randint(0, 2, (4, 64, 64))
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mesh = f"space={dist.get_world_size()}"
    model = stowplan.fit(model, (images, labels), budget=budget, mesh=mesh, search=Search(moves=50))
    shards = stowplan.shards_of(model)
    folder.mkdir(parents=True, exist_ok=True)
    stowplan.plans_of(model)[0].save(folder / f"worker{dist.get_rank()}.plan.json")
    own, _ = shards.share(images, labels)
    checkpoints = Checkpoints(folder, shards.workers, model, optimizer)
    for done in range(checkpoints.resume() + 1, STEPS + 1):
        optimizer.zero_grad()
        loss = model(*own)
        if done == lost_in:
            die_during_backward(loss)
        loss.backward()
        optimizer.step()
        checkpoints.save(done)
        if dist.get_rank() == 0:
            print(f"step {done}: loss {loss.item():.6f}", flush=True)
    return digest_of(model)


def digest_of(model: nn.Module) -> str:
    """A digest: equal for equal bits."""
    contents = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(contents).hexdigest()


def die_during_backward(loss: Tensor) -> None:
    """Kill the last worker once, and not after torchrun has restarted it."""
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if is_first and dist.get_rank() == dist.get_world_size() - 1:
        loss.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[no-untyped-call]


def connect() -> None:
    """Join the process group. Each attempt has its own part of the store, which holds old addresses."""
    store, rank, count = next(rendezvous("env://"))
    own = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=count, timeout=timedelta(seconds=60))


def main(argv: Sequence[str] | None = None) -> None:
    """The program of each process that torchrun starts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--budget", default="7MiB", help="of each worker")
    parser.add_argument("--lose-worker-in", type=int, default=0, metavar="STEP")
    asked = parser.parse_args(argv)
    connect()
    digest = train(asked.folder, asked.budget, asked.lose_worker_in)
    if dist.get_rank() == 0:
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        print(f"after {restarts} restarts: parameters {digest}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
