"""Training a language model with sharded parameters, which continues on any number of workers.

torchrun --standalone --nproc-per-node 2 -m examples.sharded_parameters FOLDER

Each worker has its rows of parameters, gradients and optimizer state, and clips by the norm of all of them.
A second call with `--steps 8` continues from the checkpoint, also with another number of workers.
`--mesh data=2,sequence=2` divides samples and positions over four workers.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import stowplan
from examples.several_workers import connect
from stowplan import Checkpoints, Iteration, Mesh, Search
from stowplan.demo import GPT

STEPS = 4


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """The tokens of a step and those that follow them, the same on all workers."""
    chance = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 211, (4, 17), generator=chance)
    return tokens[:, :-1], tokens[:, 1:]


def train(folder: Path, budget: str, steps: int = STEPS, mesh: str = "") -> dict[int, float]:
    """Continue from the newest checkpoint in the folder; the losses by step."""
    torch.manual_seed(0)
    model = GPT(vocabulary=211, context=16, width=32, heads=4, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fitted = stowplan.fit(
        model,
        batch_of(1),
        budget=budget,
        mesh=Mesh(mesh or f"data={dist.get_world_size()}", parameters="shard"),
        optimizer=Iteration(optimizer, clip_norm=1.0),
        search=Search(moves=50),
    )
    shards = stowplan.shards_of(fitted)
    checkpoints = Checkpoints(folder, shards.workers, fitted, optimizer)
    losses: dict[int, float] = {}
    for step in range(checkpoints.resume() + 1, steps + 1):
        own, _ = shards.share(*batch_of(step))
        loss = fitted(*own)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.save(step)
        losses[step] = loss.item()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
    return losses


def main(argv: Sequence[str] | None = None) -> None:
    """The program of each process that torchrun starts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--budget", default="8MiB", help="of each worker, for the whole iteration")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--mesh", default="", help="such as data=2,sequence=2; without it, data=WORKERS")
    asked = parser.parse_args(argv)
    connect()
    train(asked.folder, asked.budget, asked.steps, asked.mesh)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
