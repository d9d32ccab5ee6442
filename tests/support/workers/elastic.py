"""A training with sharded parameters that goes on, time and again, on another number of workers.

Each attempt continues from the newest checkpoint. In some of them a worker is killed in the middle of a step;
the others notice, and the next attempt repeats that step.
"""

import copy
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stowplan import Iteration, Mesh, Search, fit, shards_of
from stowplan.errors import WorkerLost
from stowplan.techniques.shards.plan.mesh import parse_mesh
from stowplan.techniques.shards.run.checkpoints import Checkpoints
from tests.support.nets import Example
from tests.support.workers.compared import example_of
from tests.support.workers.processes import on_workers
from tests.support.workers.sharded import CLIP

MESHES = ("data=1", "data=2", "sequence=2", "data=3", "data=4", "data=2,sequence=2", "sequence=4")
_SAMPLES = 6


@dataclass(frozen=True, slots=True)
class Attempt:
    """A mesh that takes the training up to a step; its last worker may be lost in that step."""

    mesh: str
    until: int
    is_lost: bool

    @property
    def workers(self) -> int:
        return parse_mesh(self.mesh).size


def random_attempts(chance: Random, changes: int) -> Iterator[Attempt]:
    """Attempts of which each has another number of workers than the one before."""
    until, workers = 0, 0
    for _ in range(changes + 1):
        mesh = chance.choice([each for each in MESHES if parse_mesh(each).size != workers])
        workers, until = parse_mesh(mesh).size, until + chance.randrange(1, 3)
        is_lost = workers > 1 and chance.random() < 0.5
        yield Attempt(mesh, until, is_lost)
        until -= is_lost


def losses_alone(steps: int) -> dict[int, float]:
    """The losses by step of one process that is left alone, without a plan."""
    model, optimizer = model_and_optimizer()
    losses = {}
    torch.manual_seed(5)
    for step in range(1, steps + 1):
        loss = model(*batch_of(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = float(loss.detach())
    return losses


def losses_in(attempt: Attempt, folder: Path) -> dict[int, float]:
    """The losses by step that the workers of an attempt complete."""
    dying = frozenset([attempt.workers - 1] if attempt.is_lost else [])
    first, *others = on_workers(attempt.workers, _continue, folder, attempt, dying=dying)
    assert all(each == first for each in others)
    found: dict[int, float] = first
    return found


def _continue(folder: Path, attempt: Attempt) -> dict[int, float]:
    model, optimizer = model_and_optimizer()
    fitted = fit(
        model,
        batch_of(1),
        budget="1GiB",
        mesh=Mesh(attempt.mesh, parameters="shard"),
        optimizer=Iteration(optimizer, clip_norm=CLIP),
        search=Search(moves=20),
    )
    shards = shards_of(fitted)
    checkpoints = Checkpoints(folder, shards.workers, fitted, optimizer)
    losses: dict[int, float] = {}
    torch.manual_seed(5)
    try:
        for step in range(checkpoints.resume() + 1, attempt.until + 1):
            shares, _ = shards.share(*batch_of(step))
            loss = fitted(*shares)
            if attempt.is_lost and step == attempt.until and dist.get_rank() == attempt.workers - 1:
                loss.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.save(step)
            losses[step] = float(loss.detach())
    except WorkerLost as lost:
        if lost.suspects != (attempt.workers - 1,):
            raise
    return losses


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A GPT with its first parameters, and AdamW."""
    model = copy.deepcopy(_example().model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch_of(step: int) -> tuple[Tensor, ...]:
    """The samples of a step: in another order than those of other steps."""
    order = torch.randperm(_SAMPLES, generator=torch.Generator().manual_seed(step))
    return tuple(each[order] for each in _example().args)


@cache
def _example() -> Example:
    return example_of("gpt", batch=_SAMPLES)
