"""Held blocks, carried out: code around the ops of a step that takes free memory for a moment.

The caching allocator then has one place for what the op allocates: the one that the plan chose
(`plan/allocator/held_blocks.py`). A held block is a tensor that nobody writes to; it takes no kernel. If a
block cannot be had, because the allocator's memory is not as projected, none is held from then on. Gradients
that are enlarged are copied into a storage of their own, which is allocated before their op.

Where the allocator's layout can be read, what is held is chosen anew for the blocks that are there when a
step begins.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from stowplan.analyse.timeline import Doing
from stowplan.ir import Op
from stowplan.ir.heap import BlockState, HeapBlock, HeapSegment
from stowplan.plan.allocator.held_blocks import HeldBlocks, held_amid
from stowplan.plan.allocator.settings import LARGE_BLOCK
from stowplan.plan.explain.timeline import timeline_of_plan
from stowplan.plan.plan import Plan
from stowplan.run.step.placing import Placing
from stowplan.units import format_bytes


def layout_of_cuda(device: torch.device) -> list[HeapSegment]:
    """The segments of the common pool of a CUDA device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    snapshot = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]  # of PyTorch
    found = [each for each in snapshot if each["device"] == index and each["segment_pool_id"] == (0, 0)]
    return [_segment_of(each) for each in sorted(found, key=lambda each: each["address"])]


def _segment_of(told: Mapping[str, Any]) -> HeapSegment:
    blocks, address = list[HeapBlock](), told["address"]
    for block in told["blocks"]:
        state = BlockState.FREE if block["state"] == "inactive" else BlockState.ALLOCATED
        blocks.append(HeapBlock(address, block["size"], block["requested_size"], state))
        address += block["size"]
    is_small, is_expandable = told["segment_type"] == "small", told.get("is_expandable", False)
    return HeapSegment(
        told["address"],
        told["total_size"],
        is_small,
        tuple(blocks),
        stream=told["stream"],
        is_expandable=is_expandable,
    )


LAYOUTS: dict[str, Callable[[torch.device], Sequence[HeapSegment]]] = {"cuda": layout_of_cuda}
"""By type of device, how the segments of its caching allocator are found."""

_LOOKS = 4  # steps whose layout is looked at when they begin; then those that begin with more reserved


class Holding(Placing):
    """Writes calls of `hold` around ops, and is what they call."""

    def __init__(self, blocks: HeldBlocks, plan: Plan, device: torch.device) -> None:
        self._blocks, self._plan, self._device = blocks, plan, device
        self._held = blocks.by_run
        self._numbers: dict[tuple[str, int], int] = {}  # of runs, by op and how often it ran before
        self._written: Counter[str] = Counter()
        self._has_room = self._is_off = False
        self._steps = self._reserved_bytes = 0
        self._there: object = None  # the large blocks when a step began
        ran: Counter[str] = Counter()
        for number, run in enumerate(timeline_of_plan(plan).runs):
            if run.doing in (Doing.COMPUTE, Doing.RECOMPUTE):
                if number in blocks.runs:
                    self._numbers[run.op, ran[run.op]] = number
                ran[run.op] += 1

    def around(self, op: Op, lines: list[str], names: Mapping[str, str]) -> list[str]:
        """The lines of an op with what is held meanwhile."""
        number = self._numbers.get((op.id, self._written[op.id]))
        self._written[op.id] += 1
        for name in reversed([name for name in op.writes() if name in self._blocks.enlarged]):
            variable, large = names[name], f"large_{names[name]}"
            moved = f"{variable} = placing.moved({variable}, {large})"
            lines = [f"{large} = placing.large_block()", *lines, moved, f"del {large}"]
        if number is not None:
            lines = [f"held = placing.hold({number})", *lines, "del held"]
        return lines

    def begins(self, _given: Iterable[Tensor] = (), _say_once: Callable[[str], None] | None = None) -> None:
        """Have room for it, and hold what suits the allocator's layout as it is now.

        Libraries and optimizers allocate during the first steps what they keep.
        """
        if not self._has_room:
            self._has_room = True
            self._allocated((self._blocks.step_bytes,))
        layout_of = LAYOUTS.get(self._device.type)
        if layout_of is None or self._is_off:
            return
        self._steps += 1
        reserved = torch.accelerator.memory_stats(self._device)["reserved_bytes.all.current"]
        if self._steps <= _LOOKS or reserved > self._reserved_bytes:
            self._reserved_bytes = reserved
            segments = layout_of(self._device)
            there = {block for each in segments if not each.is_small for block in each.blocks}
            if there != self._there:
                self._there, self._held = there, held_amid(self._plan, self._blocks, segments)

    def hold(self, run: int) -> list[Tensor | None]:
        """The blocks that are held during a run; the holes among them are free again."""
        held = self._held.get(run)
        if held is None or self._is_off:
            return []
        blocks = self._allocated(held.sizes)
        if blocks:
            for hole in held.holes:
                blocks[hole] = None
        return blocks

    def _allocated(self, sizes: Sequence[int]) -> list[Tensor | None]:
        """Blocks of these sizes; none, now and later, if there is no memory for them."""
        try:
            return [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
        except torch.OutOfMemoryError:
            self._is_off = True
        logging.getLogger("stowplan").warning(
            "blocks of %s could not be held: the allocator's memory is not as projected. The step runs on"
            " without held blocks and may reserve more. Hold the plan's segment before the model is loaded."
            " This is said once.",
            format_bytes(sum(sizes)),
        )
        return []

    def large_block(self) -> UntypedStorage:
        """The smallest storage that the large pool has."""
        return torch.empty(LARGE_BLOCK, dtype=torch.uint8, device=self._device).untyped_storage()

    def moved(self, gradient: Tensor, large: UntypedStorage) -> Tensor:
        """A copy of a gradient in a storage that may be larger."""
        view = torch.empty(0, dtype=gradient.dtype, device=self._device)
        return view.set_(large, 0, gradient.shape, gradient.stride()).copy_(gradient)
