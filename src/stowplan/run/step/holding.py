"""Held blocks, carried out: code around the ops of a step that takes free memory for a moment.

The caching allocator then has one place for what the op allocates: the one that the plan chose
(`plan/allocator/held_blocks.py`). A held block is a tensor that nobody writes to; it takes no kernel. If a
block cannot be had, because the allocator's memory is not as projected, none is held from then on. Gradients
that are enlarged are copied into a storage of their own, which is allocated before their op.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, UntypedStorage

from stowplan.analyse.timeline import Doing
from stowplan.ir import Op
from stowplan.plan.allocator.held_blocks import Held, HeldBlocks
from stowplan.plan.allocator.settings import LARGE_BLOCK
from stowplan.plan.explain.timeline import timeline_of_plan
from stowplan.plan.plan import Plan
from stowplan.units import format_bytes


class HoldingCode:
    """Writes calls of `hold` around ops, and is what they call."""

    def __init__(self, blocks: HeldBlocks, plan: Plan, device: torch.device) -> None:
        self._held: dict[tuple[str, int], Held] = {}  # by op, and how often it ran before
        self._written: Counter[str] = Counter()
        self._device, self._step_bytes, self._enlarged = device, blocks.step_bytes, blocks.enlarged
        self._has_room = self._is_off = False
        ran: Counter[str] = Counter()
        for number, run in enumerate(timeline_of_plan(plan).runs):
            if run.doing in (Doing.COMPUTE, Doing.RECOMPUTE):
                if held := blocks.by_run.get(number):
                    self._held[run.op, ran[run.op]] = held
                ran[run.op] += 1

    def around(self, op: Op, lines: list[str], names: Mapping[str, str]) -> list[str]:
        """The lines of an op with what is held meanwhile; to be asked in the order of the steps."""
        held = self._held.get((op.id, self._written[op.id]))
        self._written[op.id] += 1
        for name in reversed([name for name in op.writes() if name in self._enlarged]):
            variable, large = names[name], f"large_{names[name]}"
            moved = f"{variable} = holding.moved({variable}, {large})"
            lines = [f"{large} = holding.large_block()", *lines, moved, f"del {large}"]
        if held is not None:
            lines = [f"held = holding.hold({held.sizes}, {tuple(sorted(held.holes))})", *lines, "del held"]
        return lines

    def make_room(self) -> None:
        """Before the first run: have one free block for the step, if the segment is not held already."""
        if not self._has_room:
            self._has_room = True
            self.hold((self._step_bytes,), ())

    def hold(self, sizes: Sequence[int], holes: Sequence[int]) -> list[Tensor | None]:
        """Blocks of these sizes; the holes among them are free again."""
        if self._is_off:
            return []
        try:
            held: list[Tensor | None] = [
                torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes
            ]
        except torch.OutOfMemoryError:
            self._is_off = True
            logging.getLogger("stowplan").warning(
                "blocks of %s could not be held: the allocator's memory is not as projected. The step runs on"
                " without held blocks and may reserve more. Hold the plan's segment before the model is"
                " loaded. This is said once.",
                format_bytes(sum(sizes)),
            )
            return []
        for hole in holes:
            held[hole] = None
        return held

    def large_block(self) -> UntypedStorage:
        """The smallest storage that the large pool has."""
        return torch.empty(LARGE_BLOCK, dtype=torch.uint8, device=self._device).untyped_storage()

    def moved(self, gradient: Tensor, large: UntypedStorage) -> Tensor:
        """A copy of a gradient in a storage that may be larger."""
        view = torch.empty(0, dtype=gradient.dtype, device=self._device)
        return view.set_(large, 0, gradient.shape, gradient.stride()).copy_(gradient)
