"""Steps that spend every idle interval on disk, and disks that fail at a chosen call."""

import copy
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EIO
from pathlib import Path

import torch
from torch import Tensor, nn

from stowplan.capture import Captured, capture
from stowplan.plan.steps import Step
from stowplan.run.step.straight import StraightStep, baseline_steps
from stowplan.techniques.offload.plan.idle_intervals import idle_intervals_of
from stowplan.techniques.offload.plan.insert_transfers import Move, insert_transfers
from stowplan.techniques.offload.run.calls import SystemCalls
from stowplan.techniques.offload.run.disk import DiskTier
from stowplan.techniques.offload.run.spill import BLOCK

SMALL = 2**14  # bytes of a chunk, so that small tensors take several


class Little(nn.Module):
    """Buffers that a step changes, a mask that must not be drawn anew, and tensors that wait for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.drop = nn.BatchNorm2d(8), nn.Dropout(0.3)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.drop(torch.relu(self.norm(self.first(images))))
        result: Tensor = torch.sigmoid(self.second(hidden)).square().mean()
        return result


def everything_moved(captured: Captured, *, gradients: bool = True) -> tuple[Step, ...]:
    """The baseline with every idle interval spent in the tier, from its first to its last moment."""
    steps = baseline_steps(captured.graph)
    intervals = idle_intervals_of(captured.graph, steps, gradients=gradients)
    return insert_transfers(
        steps, [Move(interval, interval.after, interval.before) for interval in intervals]
    )


@dataclass(frozen=True, slots=True)
class Spilling:
    """A model, its step that spills all there is, and the tier it spills to."""

    model: nn.Module
    step: StraightStep
    tier: DiskTier
    args: tuple[Tensor, ...]

    def train(self, between: Callable[[], None] | None = None) -> None:
        """One step from fresh gradients; `between` is called before the backward half."""
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        loss = self.step(*self.args)
        assert isinstance(loss, Tensor)
        if between:
            between()
        torch.autograd.backward(loss)

    def flip(self, place: int, bits: int) -> None:
        """Damage one byte of the spill file."""
        with mmap.mmap(-1, BLOCK) as block:  # aligned, as direct transfers must be
            os.preadv(self.tier.spill.file, [block], place - place % BLOCK)
            block[place % BLOCK] ^= bits
            os.pwrite(self.tier.spill.file, block, place - place % BLOCK)

    def settle(self) -> None:
        """Let transfers that a failed step has left behind come to their end."""
        for engine in (self.tier.writer, self.tier.reader):
            engine.submit(int).result()

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers."""
        return copy.deepcopy(self.model.state_dict())

    def gradients(self) -> dict[str, Tensor]:
        """What the last step has left."""
        named = self.model.named_parameters()
        return {name: p.grad.clone() for name, p in named if p.grad is not None}


@contextmanager
def spilling(folder: Path, *, calls: SystemCalls | None = None, direct: bool = True) -> Iterator[Spilling]:
    """The little model's step; the same numbers each time."""
    torch.manual_seed(0)
    model, args = Little(), (torch.randn(2, 3, 16, 16),)
    tier = DiskTier(folder, calls=calls, direct=direct, chunk_bytes=SMALL)
    try:
        captured = capture(model, args)
        yield Spilling(
            model, StraightStep(captured, model, steps=everything_moved(captured), tier=tier), tier, args
        )
    finally:
        tier.close()


class FailingCalls(SystemCalls):
    """Fails at the n-th call of one kind, counted from when it is told to."""

    def __init__(self, kind: str) -> None:
        self._kind, self._left = kind, -1

    def fail_at(self, number: int) -> None:
        """The call to fail; the first is 1."""
        self._left = number

    @property
    def has_failed(self) -> bool:
        return self._left == 0

    def _count(self, kind: str) -> None:
        if kind == self._kind and self._left > 0:
            self._left -= 1
            if not self._left:
                raise OSError(EIO, "told to fail")

    def allocate(self, file: int, offset: int, nbytes: int) -> None:
        self._count("allocate")
        super().allocate(file, offset, nbytes)

    def write(self, file: int, data: memoryview, offset: int) -> int:
        self._count("write")
        return super().write(file, data, offset)

    def read(self, file: int, data: memoryview, offset: int) -> int:
        self._count("read")
        return super().read(file, data, offset)

    def flush(self, file: int) -> None:
        self._count("flush")
        super().flush(file)


def same(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> bool:
    """Equal to the bit, all of them."""
    return expected.keys() == found.keys() and all(torch.equal(expected[k], found[k]) for k in expected)
