"""An arena plugs in here: the budget then limits the arena and what lies beside it."""

from dataclasses import dataclass, replace

from stowplan.capture import Captured
from stowplan.errors import BudgetTooSmall
from stowplan.plan.explain.timeline import timeline_of_plan
from stowplan.plan.plan import Plan
from stowplan.run.cost.machine import device_of
from stowplan.run.planning.constraint import CONSTRAINTS, taken_bytes
from stowplan.run.planning.planner import DraftedStep
from stowplan.techniques.arena.plan.layout import ArenaLayout, lay_out
from stowplan.techniques.arena.run.code import InArena, placements_of
from stowplan.units import format_bytes


@dataclass(frozen=True, slots=True)
class ArenaPlacement:
    """The tensors of a step lie in an arena, as a layout says."""

    layout: ArenaLayout

    def placing(self, captured: Captured, plan: Plan) -> InArena:  # noqa: ARG002 -- the layout was made of it
        """Writes the code of the step."""
        return InArena(captured, self.layout, device_of(captured.graph))


class WithinArena:
    """The arena and what lies beside it keep to the budget."""

    def applied_to(self, step: DraftedStep) -> DraftedStep:
        """The step with a layout."""
        layout = layout_of(step)
        placement = ArenaPlacement(layout)
        return replace(step, placement=placement, draft=replace(step.draft, arena=layout.use))

    def excess_bytes(self, step: DraftedStep, allowed_bytes: int) -> int:
        """Of the arena, what lies beside it, and states of the generator."""
        return taken_bytes(step) - allowed_bytes

    def refusal(
        self, step: DraftedStep, allowed_bytes: int, refused: BudgetTooSmall | None
    ) -> BudgetTooSmall:
        """Names a budget that suffices."""
        least = taken_bytes(step)
        return BudgetTooSmall(
            f"{format_bytes(allowed_bytes)} allowed, but the smallest arena that was found takes"
            f" {format_bytes(least)} ({least} bytes) together with what lies beside it; without an arena the"
            " step may fit",
            allowed_bytes=allowed_bytes,
            minimum_bytes=least,
            binding=refused.binding if refused else (),
        )


def layout_of(step: DraftedStep) -> ArenaLayout:
    """Where the tensors of a planned step lie in an arena."""
    graph, program, device = step.captured.graph, step.captured.program, device_of(step.captured.graph)
    placements = placements_of(step.captured, step.draft.steps, step.draft.pricing.workspace_bytes, device)
    leaving = {graph.storage_of(gradient) for gradient in program.gradients.values()}
    alignment = 64 if device.type == "cpu" else 512  # of blocks of PyTorch's allocators
    return lay_out(timeline_of_plan(step.draft), placements, leaving=leaving, alignment=alignment)


CONSTRAINTS.register("arena")(WithinArena())
