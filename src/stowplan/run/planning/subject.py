"""Subject: a captured step and the call it was captured of. A planned step: its plan and how to run it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn

from stowplan.capture import Captured
from stowplan.capture.recording import Loss
from stowplan.plan.frontier import Point
from stowplan.plan.plan import Plan
from stowplan.run.planning.recapture import Replacement, forward_ops, recapture
from stowplan.run.step.function import Consumer, waiting_of
from stowplan.run.step.straight import StraightStep
from stowplan.torch_private import OpOverload

if TYPE_CHECKING:
    from stowplan.plan.allocator.arena import ArenaLayout


@dataclass(frozen=True, slots=True)
class Subject:
    """A captured step and the call that it was captured of, with the loss after it.

    `replacements` are run for some of its calls.
    """

    captured: Captured
    model: nn.Module
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    replacements: Mapping[OpOverload, Replacement] = field(default_factory=dict)
    loss: Loss | None = None

    def as_run(self) -> Captured:
        """The step with the replacements."""
        if not self.replacements:
            return self.captured
        order = forward_ops(self.captured.graph)
        return recapture(self.captured, self.model, self.args, self.kwargs, order, self.replacements)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan and its step, which techniques may have captured a second time.

    `points` are the frontier of the step, if it was searched. The decisions of a plan that is `carried` come
    from a plan of the same program at another size. With an `arena`, the step's tensors lie there.
    """

    plan: Plan
    captured: Captured
    points: tuple[Point, ...] = ()
    is_carried: bool = False
    arena: "ArenaLayout | None" = None

    def bound_to(
        self,
        model: nn.Module,
        *,
        loss: object = None,
        places: Mapping[int, tuple[Any, Any]] = MappingProxyType({}),
        consumer: Consumer | None = None,
    ) -> StraightStep:
        """The step, ready to be called like the model; `places` has where some of its constants are found.

        `consumer` takes the gradients that the plan consumes.
        """
        return StraightStep(
            self.captured,
            model,
            loss=loss,
            steps=self.plan.steps,
            waiting=waiting_of(model),
            places=places,
            consumer=consumer,
            arena=self.arena,
        )
