"""Training with sharded parameters over real processes beside the same training in one process."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stowplan import fit, shards_of
from stowplan.ops.effects import BEGIN_GATHER, BEGIN_IN_ORDER, END_GATHER
from stowplan.plan.plan import Plan
from stowplan.plan.steps import Compute, RecomputeOp, Step
from stowplan.run.measure.measure import measure
from stowplan.run.planning.planner import PlannedStep
from stowplan.techniques.iteration.run.iteration import RunningIteration
from stowplan.techniques.shards.run.checkpoints import Checkpoints
from tests.support.asking import asked
from tests.support.workers.compared import distance, example_of

CLIP = 0.5
"""A norm that gradients of the nets exceed."""


@dataclass(frozen=True, slots=True)
class Trained:
    """How far losses and parameters are from those of one process, and what the worker took and sent."""

    far: float
    allowed_bytes: int
    measured_bytes: int
    projected_bytes: int
    sent_bytes: tuple[int, int]  # measured and projected
    recomputed: int  # gathers that are repeated for backward
    early: int  # gathers that begin while others are read

    @property
    def is_right(self) -> bool:
        within = self.measured_bytes <= self.allowed_bytes
        return self.far <= 1e-12 and within and self.sent_bytes[0] == self.sent_bytes[1]


def iterate(
    step: Callable[..., Tensor],
    args: tuple[Any, ...],
    optimizer: torch.optim.Optimizer,
    clips: nn.Module | None,
    accumulate: int = 1,
) -> float:
    """One iteration of the usual loop, and its last loss."""
    for _ in range(accumulate):
        loss = step(*args)
        loss.backward()  # type: ignore[no-untyped-call]
    if clips is not None:
        nn.utils.clip_grad_norm_(clips.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


class Training:
    """AdamW with clipping and dropout, on all workers and in this process alone, from the same parameters."""

    def __init__(
        self, budget: int | str, *, net: str = "gpt", batch: int = 4, mesh: str = "", **options: Any
    ) -> None:
        """Without `mesh`, samples are divided over all workers."""
        self.model, self.args = example_of(net, batch=batch)
        self._first = copy.deepcopy(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._accumulate: int = options.get("accumulate", 1)
        self._clips: bool = options.get("clip_norm", CLIP) is not None
        mesh = mesh or f"data={dist.get_world_size()}"
        how: dict[str, Any] = {"mesh": mesh, "parameters": "shard", "moves": 100, "optimizer": self.optimizer}
        self.fitted = fit(
            self.model, self.args, budget=budget, **asked({**how, "clip_norm": CLIP, **options})
        )

    @property
    def iteration(self) -> RunningIteration:
        """Of the fitted module."""
        found: RunningIteration = self.fitted.__dict__["_fitting"].iteration
        return found

    def checkpoints(self, folder: Path) -> Checkpoints:
        """Of model and optimizer in this folder."""
        return Checkpoints(folder, shards_of(self.fitted).workers, self.fitted, self.optimizer)

    def values(self) -> list[Tensor]:
        """The whole parameters."""
        with shards_of(self.fitted).whole():
            return _values(self.model)

    def state_in_memory(self) -> list[Tensor]:
        """The tensors of the optimizer's state that are in no tier."""
        return [t for each in self.optimizer.state.values() for t in each.values() if not t.is_meta]

    def run(self, iterations: int) -> Trained:
        """What these iterations give, from the first parameters."""
        plain, sharded = copy.deepcopy(self._first), shards_of(self.fitted)
        with sharded.whole():
            self.model.load_state_dict(plain.state_dict())
        self.optimizer.state.clear()
        alone = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        torch.manual_seed(3)
        times = self._accumulate
        clipped = plain if self._clips else None
        expected = [iterate(plain, self.args, alone, clipped, times) for _ in range(iterations)]
        torch.manual_seed(3)
        losses, peak = list[float](), 0
        shares, _ = sharded.share(*self.args)
        for _ in range(iterations):
            sharded.workers.sent_bytes = 0
            before = [*shares, *self.model.parameters(), *self.model.buffers(), *self.state_in_memory()]
            taken = measure(partial(iterate, self.fitted, shares, self.optimizer, None, times), before=before)
            losses.append(taken.result)
            peak = max(peak, taken.measured_peak_bytes)
        off = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
        far = distance(self.values(), _values(plain))
        planned: PlannedStep = self.fitted.__dict__["_fitting"].planned
        steps = planned.plan.steps
        return Trained(
            max(far, off),
            planned.plan.allowed_bytes + sharded.remembered_bytes,
            peak,
            planned.plan.projected_peak_bytes,
            (sharded.workers.sent_bytes, times * sharded.sent_bytes(planned)),
            sum(_repeats_a_gather(step) for step in steps),
            early_in(planned.plan),
        )


def early_in(plan: Plan) -> int:
    """How many gathers begin while others are read."""
    types = {op.id: op.type for op in plan.graph.ops}
    run = [types[step.op] for step in plan.steps if isinstance(step, Compute | RecomputeOp)]
    begins = (at for at, kind in enumerate(run) if kind in (BEGIN_GATHER, BEGIN_IN_ORDER))
    return sum(run[at + 1] != END_GATHER for at in begins)


def _repeats_a_gather(step: Step) -> bool:
    if isinstance(step, RecomputeOp):
        return "begin_gather" in step.op
    return isinstance(step, Compute) and "gather" in step.op and step.op.endswith("_again")


def _values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]
