"""A worker dies in the middle of a step: the others say so at once, with whole parameters, and can go on."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from benchmarks.nets import NETS
from benchmarks.shards.processes import on_workers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from stowplan.errors import BadUse, WorkerLost
from stowplan.plan.shards.mesh import parse_mesh
from stowplan.run.shards.step import ShardedStep
from stowplan.run.shards.workers import Workers

pytestmark = pytest.mark.torch

STEPS = 3


class Training:
    """A small net with batch norm, trained over two workers."""

    def __init__(self) -> None:
        self.model, args = NETS["resnet50"].build("tiny", layers=(1, 1), resolution=32)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.sharded = ShardedStep(self.model, args, mesh=parse_mesh("space=2"))
        self.shares, _ = self.sharded.share(*args)

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.sharded(*self.shares)
        assert isinstance(loss, Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def state(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def contents_of(model: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def die_in_the_second_step(after: int) -> tuple[int, float, bool]:
    """Worker 1 dies after some messages; what worker 0 was told, after how long, with which parameters."""
    training = Training()
    training.step()
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    if dist.get_rank() == 1:
        _die_after(after)
    started = time.monotonic()
    try:
        training.step()
    except WorkerLost as lost:
        assert lost.suspects == (1,)  # noqa: PT017 -- in another process than pytest's
        pairs = zip(before, training.model.parameters(), strict=True)
        same = all(torch.equal(old, new) for old, new in pairs)
        return lost.step, time.monotonic() - started, same
    return 0, 0.0, False


def _die_after(messages: int) -> None:
    swap, add_up, begin_sum = Workers.swap, Workers.add_up, Workers.begin_sum
    left = [messages]

    def counted() -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    def dying_swap(
        self: Workers, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]
    ) -> Callable[[], None]:
        counted()
        return swap(self, sends, receives)

    def dying_add_up(self: Workers, tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
        counted()
        return add_up(self, tensor, axes)

    def dying_begin_sum(self: Workers, tensor: Tensor, axes: tuple[int, ...]) -> None:
        counted()
        begin_sum(self, tensor, axes)

    Workers.begin_sum = dying_begin_sum  # type: ignore[method-assign]
    Workers.swap = dying_swap  # type: ignore[method-assign, assignment]
    Workers.add_up = dying_add_up  # type: ignore[method-assign]


@pytest.mark.parametrize("after", [5, 30])
def test_a_worker_that_dies_is_named_at_once_and_no_parameter_has_changed(after: int) -> None:
    ((step, seconds, same),) = on_workers(2, die_in_the_second_step, after, dying=frozenset({1}))
    assert step == 2
    assert seconds < 5
    assert same


def train_with_a_break(folder: str) -> bool:
    """Whether training that is saved and begun anew ends with the bits of training without a break."""
    whole = Training()
    for _ in range(STEPS):
        whole.step()
    first = Training()
    first.step()
    save(first.state(), checkpoint_id=folder)
    second = Training()
    for parameter in second.model.parameters():
        parameter.data.fill_(0.5)
    second.step()  # so that there is momentum to load into
    state = second.state()
    load(state, checkpoint_id=folder)
    second.model.load_state_dict(state["model"])  # type: ignore[arg-type]
    second.optimizer.load_state_dict(state["optimizer"])  # type: ignore[arg-type]
    for _ in range(STEPS - 1):
        second.step()
    pairs = zip(contents_of(whole.model), contents_of(second.model), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def test_training_resumed_from_a_checkpoint_ends_with_the_same_bits(tmp_path: Path) -> None:
    assert on_workers(2, train_with_a_break, str(tmp_path / "saved")) == [True, True]


def test_a_mesh_without_its_processes_is_refused() -> None:
    with pytest.raises(BadUse, match="0 processes are connected"):
        Workers(parse_mesh("space=2"))
