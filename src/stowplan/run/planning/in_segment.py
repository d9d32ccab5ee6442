"""Planning a step that holds blocks, so that the caching allocator reserves one segment for what is large."""

from dataclasses import replace

from stowplan.errors import BadUse
from stowplan.plan.allocator.projection import project
from stowplan.plan.allocator.settings import AllocatorSettings
from stowplan.run.cost.machine import device_of
from stowplan.run.planning.planner import DraftedStep


def in_segment(step: DraftedStep) -> DraftedStep:
    """The step with the blocks that its code holds, if it reserves less with them."""
    device = device_of(step.captured.graph)
    if device.type == "cpu":
        raise BadUse(
            "held_blocks=True is for a device with PyTorch's caching allocator, and the step is on the CPU:"
            " leave it out, or use arena=True"
        )
    heap = project(step.draft, AllocatorSettings(), repair=False, held_blocks=True)
    return replace(step, held_blocks=heap.held_blocks)
