"""A step over a mesh within a budget: each worker's part of it is captured, priced and planned like any step.

What a worker says to others are ops of its step that run once, in the order that their token gives: every
worker may keep, recompute and place whatever else it likes.
"""

from collections.abc import Mapping, Sequence
from functools import wraps
from typing import Any

from torch import nn

from stowplan.capture import capture
from stowplan.plan.plan import Plan
from stowplan.plan.shards.mesh import Mesh
from stowplan.run.planning import plan_within, planner_for_captured
from stowplan.run.shards.step import ShardedStep
from stowplan.run.stand_in import with_forward
from stowplan.run.straight import StraightStep
from stowplan.units import parse_bytes


class FittedShard:
    """Called with this worker's shares of the arguments; stays under its budget. `plan` says how."""

    def __init__(self, step: ShardedStep, model: nn.Module, allowed_bytes: int, moves: int | None) -> None:
        self.step = step
        args, kwargs = step.example
        captured = capture(_local_model(step, model), args, kwargs)
        with step.workers.rehearsing():
            planner = planner_for_captured(captured, moves=moves)
        self.plan: Plan = plan_within(planner, allowed_bytes)
        self._run = StraightStep(captured, model, steps=self.plan.steps)

    def share(self, *args: object, **kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """This worker's part of arguments that are whole."""
        return self.step.share(*args, **kwargs)

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.step.workers.step += 1
        return self._run(*args, **kwargs)


def fit_sharded(
    model: nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object] | None = None,
    *,
    budget: int | str,
    mesh: Mesh,
    dims: Mapping[str, Sequence[int | None]] | None = None,
    reserve: int | str = 0,
    moves: int | None = None,
) -> FittedShard:
    """The step of `model(*args, **kwargs)` over `mesh`, each worker under `budget` bytes.

    All processes of the mesh call this alike; the arguments are whole, and may be on the meta device. Which
    dims of them the axes cut follows from the axes' names, or is given by `dims`, by input.
    """
    step = ShardedStep(model, args, kwargs, mesh=mesh, dims=dims)
    return FittedShard(step, model, parse_bytes(budget) - parse_bytes(reserve), moves)


def _local_model(step: ShardedStep, model: nn.Module) -> nn.Module:
    """The model with another forward: this worker's actions."""

    @wraps(type(model).forward)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        return step.run(step.bound_to(self).tensors(args, kwargs))

    return with_forward(model, forward)
