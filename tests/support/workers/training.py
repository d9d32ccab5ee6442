"""Small trainings over workers, with all that half a step could leave behind: batch norm, dropout, AdamW.

One has whole parameters on each worker, the other shards of parameters and of the optimizer's state.

Each worker returns digests of its state by steps done, and what it was told when another was lost.
"""

import hashlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from stowplan import Iteration, Mesh, Search, fit, shards_of
from stowplan.errors import WorkerLost
from stowplan.techniques.shards.plan.mesh import parse_mesh
from stowplan.techniques.shards.run import checkpoints, workers
from stowplan.techniques.shards.run.checkpoints import Checkpoints
from stowplan.techniques.shards.run.step import ShardedStep
from stowplan.techniques.shards.run.workers import Workers
from tests.support.nets import Supervised
from tests.support.workers.elastic import batch_of, model_and_optimizer
from tests.support.workers.phases import Fault, Journal, Phase
from tests.support.workers.processes import on_workers
from tests.support.workers.sharded import CLIP

MESHES = {2: "space=2", 3: "space=3", 4: "data=2,space=2"}
SHARDED_PHASES = tuple(phase for phase in Phase if phase is not Phase.SUMS)  # gradients add up in backward
SAVED_EVERY = 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """Digests by steps done, the last of them after the loss; who was lost and when this worker knew."""

    done: int
    digests: dict[int, str]
    step: int | None
    suspects: tuple[int, ...]
    noticed: float


class Training:
    """A net, its optimizer and its checkpoints, as one worker has them."""

    def __init__(self, folder: Path, fault: Fault | None, plant: str) -> None:
        torch.manual_seed(3)
        self.model: nn.Module = Supervised(_network(), F.cross_entropy)
        args = torch.randn(2, 1, 24, 24), torch.randint(0, 2, (2, 24, 24))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.step = ShardedStep(self.model, args, mesh=parse_mesh(MESHES[dist.get_world_size()]))
        self.shares, _ = self.step.share(*args)
        self.checkpoints = Checkpoints(folder, self.step.workers, self.model, self.optimizer)
        self.journal = Journal(folder / f"journal-{dist.get_rank()}", _own(fault))
        self._updates_before_the_sums = plant == UPDATE_BEFORE_THE_SUMS

    def advance(self) -> None:
        """One step."""
        self.optimizer.zero_grad()
        self.journal.enter(Phase.FORWARD)
        loss = self.step(*self.shares)
        assert isinstance(loss, Tensor)
        node_named("BucketedBackward", loss).register_prehook(self._sums_begin)
        self.journal.enter(Phase.BACKWARD)
        loss.backward()  # type: ignore[no-untyped-call]
        self.journal.enter(Phase.OPTIMIZER)
        self.optimizer.step()
        self.journal.enter(Phase.BETWEEN)

    def _sums_begin(self, _: object) -> None:
        self.journal.enter(Phase.SUMS)
        if self._updates_before_the_sums:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(0.99)

    def save(self, done: int) -> None:
        """A checkpoint."""
        self.journal.enter(Phase.SAVE)
        self.checkpoints.save(done)
        self.journal.enter(Phase.BETWEEN)

    def digest(self) -> str:
        """Of every bit that the next step starts from, but for the generator's."""
        found = hashlib.sha256()
        for tensor in self._state():
            found.update(tensor.detach().numpy().tobytes())
        return found.hexdigest()

    def _state(self) -> Iterator[Tensor]:
        yield from self.model.parameters()
        yield from self.model.buffers()
        for parameter in self.model.parameters():  # loading may bring the states into another order
            for _, tensor in sorted(self.optimizer.state.get(parameter, {}).items()):
                yield tensor


def _own(fault: Fault | None) -> Fault | None:
    return fault if fault and fault.victim == dist.get_rank() else None


def _network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 2, 1),
    )


def node_named(name: str, result: Tensor) -> Any:
    """The node of this name behind a result."""
    waiting: list[Any] = [result.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if type(node).__name__ == name:
            return node
        seen.add(node)
        waiting += [each for each, _ in node.next_functions if each is not None and each not in seen]
    raise LookupError(name)


class ShardedTraining(Training):
    """Rows of a GPT's parameters and of AdamW's state, with clipping, as one worker has them."""

    def __init__(self, folder: Path, fault: Fault | None) -> None:
        self.model, self.optimizer = model_and_optimizer()
        self.fitted = fit(
            self.model,
            batch_of(1),
            budget="1GiB",
            search=Search(moves=20),
            mesh=Mesh(f"data={dist.get_world_size()}", parameters="shard"),
            optimizer=Iteration(self.optimizer, clip_norm=CLIP),
        )
        shards = shards_of(self.fitted)
        self.shares, _ = shards.share(*batch_of(1))
        self.checkpoints = Checkpoints(folder, shards.workers, self.fitted, self.optimizer)
        self.journal = Journal(folder / f"journal-{dist.get_rank()}", _own(fault))
        torch.manual_seed(5)

    def advance(self) -> None:
        """One iteration, with the update in backward."""
        self.journal.enter(Phase.FORWARD)
        loss = self.fitted(*self.shares)
        self.journal.enter(Phase.BACKWARD)
        loss.backward()
        self.journal.enter(Phase.OPTIMIZER)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.journal.enter(Phase.BETWEEN)


def train(
    folder: Path, until: int, fault: Fault | None, plant: str = "", *, is_sharded: bool = False
) -> Outcome:
    """Go on from the newest checkpoint, to the end or until a worker is lost."""
    plant_in_this_process(plant)
    training = ShardedTraining(folder, fault) if is_sharded else Training(folder, fault, plant)
    done = training.checkpoints.resume()
    digests = {done: training.digest()}
    try:
        while done < until:
            training.advance()
            done += 1
            digests[done] = training.digest()
            if not done % SAVED_EVERY:
                training.save(done)
    except WorkerLost as lost:
        noticed = time.monotonic()
        digests[done] = training.digest()
        return Outcome(done, digests, lost.step, lost.suspects, noticed)
    return Outcome(done, digests, None, (), 0.0)


@cache
def uninterrupted(
    count: int, steps: int, plant: str = "", *, is_sharded: bool = False
) -> list[dict[int, str]]:
    """By worker, digests by steps done, of a training in which nothing happens."""
    run = partial(train, is_sharded=is_sharded)
    found = [each.digests for each in on_workers(count, run, Path(tempfile.mkdtemp()), steps, None, plant)]
    assert all((digests == found[0]) != is_sharded for digests in found[1:])
    return found


UPDATE_BEFORE_THE_SUMS = "update before the sums"


def _changed_buffers_stay(_: Workers) -> None:
    pass


def _no_draws(_: object) -> dict[str, object]:
    return {}


def _newest_of_any_kind(self: Checkpoints) -> int:
    return max((int(path.name.removeprefix("step-")) for path in self._folder.glob("step-*")), default=0)


def _whom_it_talked_to(_: int, __: object, suspects: tuple[int, ...], ___: object) -> tuple[int, ...]:
    return suspects


_REPLACED: dict[str, tuple[Any, str, Any]] = {
    "buffers not given back": (Workers, "_give_back", _changed_buffers_stay),
    "draws not saved": (checkpoints, "_generators", _no_draws),
    "half a checkpoint taken": (Checkpoints, "newest", _newest_of_any_kind),
    "no roll call": (workers, "lost_among", _whom_it_talked_to),
}

PLANTS = (UPDATE_BEFORE_THE_SUMS, *_REPLACED)


def plant_in_this_process(plant: str) -> None:
    """Put the fault of this name in the place of what is right."""
    if plant in _REPLACED:
        setattr(*_REPLACED[plant])
