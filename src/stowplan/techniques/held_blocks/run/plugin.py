"""Held blocks plug in here: the caching allocator then reserves one segment for what is large."""

from dataclasses import dataclass, replace

from stowplan.capture import Captured
from stowplan.errors import BadUse, BudgetTooSmall
from stowplan.plan.allocator.held_blocks import HeldBlocks
from stowplan.plan.allocator.projection import project
from stowplan.plan.allocator.settings import AllocatorSettings
from stowplan.plan.plan import Plan
from stowplan.run.cost.machine import device_of
from stowplan.run.planning.constraint import CONSTRAINTS, taken_bytes
from stowplan.run.planning.planner import DraftedStep
from stowplan.techniques.held_blocks.run.code import Holding


@dataclass(frozen=True, slots=True)
class HoldingPlacement:
    """Blocks are held while the ops of a step allocate."""

    blocks: HeldBlocks

    def placing(self, captured: Captured, plan: Plan) -> Holding:
        """Writes the code of the step, and holds."""
        return Holding(self.blocks, plan, device_of(captured.graph))


class WithHeldBlocks:
    """The step reserves hardly more than it requests."""

    def applied_to(self, step: DraftedStep) -> DraftedStep:
        """The step with the blocks that its code holds, if it reserves less with them."""
        if device_of(step.captured.graph).type == "cpu":
            raise BadUse(
                "held_blocks=True is for a device with PyTorch's caching allocator, and the step is on the"
                " CPU: leave it out, or use arena=True"
            )
        heap = project(step.draft, AllocatorSettings(), repair=False, held_blocks=True)
        return replace(step, placement=HoldingPlacement(heap.held_blocks)) if heap.held_blocks else step

    def excess_bytes(self, step: DraftedStep, allowed_bytes: int) -> int:
        """Of what the step requests: blocks are held within that."""
        return taken_bytes(step) - allowed_bytes

    def refusal(
        self,
        step: DraftedStep,  # noqa: ARG002 -- the search's own is about requests, too
        allowed_bytes: int,  # noqa: ARG002 -- same
        refused: BudgetTooSmall | None,
    ) -> BudgetTooSmall:
        """That of the search: no plan requests more than it is allowed."""
        assert refused is not None
        return refused


CONSTRAINTS.register("held blocks")(WithHeldBlocks())
