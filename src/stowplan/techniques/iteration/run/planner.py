"""The iteration planner: a training step with the updates of its optimizer, in each way it may be planned.

It reads the optimizer and changes nothing of it, so it serves projections as well as `fit`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stowplan.capture import Captured
from stowplan.errors import BadUse, BudgetTooSmall, PlanOfAnotherStep, PlanTooSlow
from stowplan.plan.options import PlanOptions
from stowplan.plan.pricing import Tier
from stowplan.request import Iteration
from stowplan.run.optimizers import tensors_in
from stowplan.run.planning.planner import Subject
from stowplan.run.step.function import LiveTier, tier_for
from stowplan.techniques.iteration.run.one_by_one import (
    OwnHook,
    groups_by_parameter,
    hooks_before_steps,
    refuse_unless_one_by_one,
)
from stowplan.techniques.iteration.run.updates import Trained, with_updates

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Variant:
    """How an iteration is planned.

    With `two_backwards`, clipped gradients are made twice: in the first only their norm is kept.
    """

    state_away: bool = False
    two_backwards: bool = False


class IterationPlanner:
    """Makes the steps that an optimizer's iteration can be planned as."""

    def __init__(
        self,
        asked: Iteration,
        *,
        offloads: bool = False,
        on_workers: bool = False,
        device: torch.device | None = None,
        tier: Tier | None = None,
    ) -> None:
        """`offloads`: the optimizer's state may wait in the tier of its device.

        `on_workers`: the step is of a mesh, and adds up gradients over the workers before they leave it.
        `device` is where parameters on the meta device are taken to live, and `tier` the tier that it has.
        """
        optimizer, kept = asked.optimizer, asked.keep_gradients
        refuse_unless_one_by_one(optimizer)
        assert isinstance(optimizer, Optimizer)
        self.optimizer, self.accumulate = optimizer, asked.accumulate
        self.keeps_all = kept is True
        self.kept_names = frozenset(() if isinstance(kept, bool) else kept)
        self.is_state_away = False  # it is in the tier, and plans must leave it there
        self._clips, self._device, self._tier = asked.clip_norm is not None, device, tier
        self._offloads = offloads and not self.keeps_all
        # Whether a plan that consumes gradients is for two backwards: for the norm, then for the updates.
        self.repeats = self._clips and asked.accumulate == 1 and not on_workers
        self._on_workers = on_workers
        self.refuse_surroundings()

    def refuse_surroundings(self) -> None:
        """Refuse other processes, and hooks that would come after the updates."""
        workers = torch.distributed
        if self._on_workers:
            pass  # their gradients have been summed when they leave the step
        elif workers.is_available() and workers.is_initialized() and workers.get_world_size() > 1:
            raise BadUse(
                "optimizer= without a mesh is for one process: DistributedDataParallel and others add up"
                " gradients after the plan would have consumed them. Use fit(..., optimizer=,"
                f' mesh="data={workers.get_world_size()}"), where the plan adds them up, with'
                ' mesh=Mesh(..., parameters="shard") to divide the state too, or leave optimizer= out and use'
                " reserve= for the optimizer's state"
            )
        foreign = [hook for hook in hooks_before_steps(self.optimizer) if not isinstance(hook, OwnHook)]
        if foreign:
            raise BadUse(
                f"{foreign[0]} runs before each step of the optimizer, and parameters are updated in backward"
                " before it: remove it (register_step_post_hook is called as before), or leave out optimizer="
            )

    def variants(self, captured: Captured, model: nn.Module) -> list[Variant]:
        """How the step may be planned: each takes less memory and more time than those before."""
        counts = (False, True) if self._may_repeat(captured, model) else (False,)
        places = (True,) if self.is_state_away else (False, True) if self._offloads else (False,)
        return [Variant(away, two) for two in counts for away in places]

    def first_that_fits(
        self, subject: Subject, model: nn.Module, plan: Callable[[Subject], Found]
    ) -> tuple[Variant, Subject, Found]:
        """The first variant that `plan` finds a plan for; raises the smallest refusal if there is none.

        A saved plan is for one of them.
        """
        refusals, others = list[BudgetTooSmall](), list[PlanOfAnotherStep]()
        for variant in self.variants(subject.captured, model):
            step = replace(subject, captured=self.planned(subject.captured, model, variant))
            try:
                return variant, step, plan(step)
            except BudgetTooSmall as refusal:
                refusals.append(refusal)
            except PlanOfAnotherStep as other:
                others.append(other)
        if others:
            raise others[0]
        least = min(each.minimum_bytes for each in refusals)
        if slow := next((each for each in refusals if isinstance(each, PlanTooSlow)), None):
            raise slow.at_best(least) from None
        raise next(each for each in refusals if each.minimum_bytes == least) from None

    def steps(self, subject: Subject) -> list[Subject]:
        """The step with the updates of this optimizer, in all variants."""
        captured, model = subject.captured, subject.model
        return [
            replace(subject, captured=self.planned(captured, model, variant))
            for variant in self.variants(captured, model)
        ]

    @staticmethod
    def options(options: PlanOptions) -> PlanOptions:
        """What the search may use of these: no tiles, and the state is what a tier takes."""
        return replace(options, allow=("recompute",) if "recompute" in options.allow else ())

    def of_step(self, subject: Subject, options: PlanOptions) -> tuple[Subject, PlanOptions]:
        """A step with the updates of this optimizer, its state in memory, and what the search may use."""
        captured = self.planned(subject.captured, subject.model)
        return replace(subject, captured=captured), self.options(options)

    def planned(self, captured: Captured, model: nn.Module, variant: Variant | None = None) -> Captured:
        """The step with the updates of this optimizer, in the first variant if none is named."""
        variant, trained = variant or Variant(), self.trained_in(captured, model)
        if not trained:
            raise BadUse(
                "the optimizer has none of the parameters that the step differentiates: make it from those of"
                " the model that is given to fit"
            )
        watched, known = self.watched_among(trained), captured.program.parameters
        return with_updates(
            captured,
            self.optimizer,
            trained,
            stays=frozenset(
                name
                for name, each in trained.items()
                if self.keeps_all or each.parameter is watched or not self.kept_names.isdisjoint(known[name])
            ),
            in_backward=not self._clips or variant.two_backwards,
            accumulates=self.accumulate > 1,
            repeats=variant.two_backwards,
            tier=(self._tier or live_tier(model).described()) if variant.state_away else None,
            device=self._device,
            resting_bytes=self._resting_bytes(model, trained),
        )

    def _resting_bytes(self, model: nn.Module, trained: Mapping[str, Trained]) -> int:
        """The state of parameters that the step does not train: it was made before, or with the optimizer."""
        if self._on_workers:  # whose shares may differ; their steps must not
            return 0
        updated = {each.parameter for each in trained.values()}
        rest = [p for p in model.parameters() if p not in updated and p in self.optimizer.state]
        state = tensors_in(self.optimizer.state[parameter] for parameter in rest)
        is_here = {tensor: not tensor.is_meta or self._device is not None for tensor in state}
        return sum(tensor.nbytes for tensor, here in is_here.items() if here)

    def trained_in(self, captured: Captured, model: nn.Module) -> dict[str, Trained]:
        """The parameters that the optimizer updates in a step, by id, in the optimizer's order."""
        by_name, program = dict(model.named_parameters(remove_duplicate=False)), captured.program
        ids: dict[Tensor, str] = {
            by_name[names[0]]: name for name, names in program.parameters.items() if names[0] in by_name
        }
        return {
            ids[parameter]: Trained(parameter, group)
            for parameter, group in groups_by_parameter(self.optimizer).items()
            if parameter in ids and ids[parameter] in program.gradients
        }

    def watched_among(self, trained: Mapping[str, Trained]) -> Tensor | None:
        """The parameter whose gradient stays to show changes: the smallest; None if all gradients stay."""
        smallest = min((each.parameter for each in trained.values()), key=lambda p: p.nbytes)
        return None if self.keeps_all else smallest

    def _may_repeat(self, captured: Captured, model: nn.Module) -> bool:
        """Whether the step can be run a second time after the norm of its gradients is known."""
        program, tensors = captured.program, captured.graph.tensors
        looks = {((self._device or p.device).type, p.dtype) for p in model.parameters()}
        scalar = all(tensors[name].shape == () for name in program.tangents if name is not None)
        parameters_only = program.gradients.keys() <= program.parameters.keys()
        on_cpu = len(looks) == 1 and next(iter(looks))[0] == "cpu"
        return self.repeats and not self.keeps_all and scalar and parameters_only and on_cpu


def live_tier(model: nn.Module) -> LiveTier:
    """The tier of the device that a model's parameters are on."""
    return tier_for(next(model.parameters()).device)
