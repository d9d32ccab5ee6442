"""Roll call: who of the workers still answers, asked as soon as one of them notices that another is gone.

A worker sees its own connections alone, and the one that closes may be that of a worker who gave up because
of a third. Who notices therefore says so in the store through which the processes met, then hangs up on all,
so that all notice at once. Those who do not answer within a short time are the ones that are lost.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Event, Thread

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from stowplan.torch_private import abort, store_of

ANSWER_SECONDS = 1.5
"""How long the others have to answer: a live worker on a busy machine must not be taken for a lost one."""

_HANG_UP_TAG = 0x5709  # of messages that nobody sends


def lost_among(
    rank: int, others: Sequence[int], suspects: tuple[int, ...], groups: Iterable[ProcessGroup]
) -> tuple[int, ...]:
    """Those of `others` that do not answer; the suspects, if all do or nobody can be asked."""
    call = _Call(rank, others)
    call.start()
    call.said.wait(ANSWER_SECONDS)
    for group in groups:
        hang_up(group)
    call.join(ANSWER_SECONDS)
    silent = tuple(other for other in others if other not in call.answered)
    return silent if call.heard.is_set() and silent else suspects


class _Call(Thread):
    """Says that this worker is there and hears who else is; a thread, for the store's host may hang."""

    def __init__(self, rank: int, others: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self._rank, self._others = rank, others
        self.said, self.heard, self.answered = Event(), Event(), set[int]()

    def run(self) -> None:
        with suppress(RuntimeError):  # the store went with the worker that served it
            store = store_of(world())
            store.set(_key(self._rank), "here")
            self.said.set()
            ends = time.monotonic() + ANSWER_SECONDS
            while len(self.answered) < len(self._others) - 1 and time.monotonic() < ends:
                self.answered |= {other for other in self._others if store.check([_key(other)])}
                self.heard.set()
                time.sleep(0.005)


def forget_losses(rank: int) -> None:
    """Take back what this worker said in the same store before it was started again."""
    store_of(world()).delete_key(_key(rank))


def hang_up(group: ProcessGroup) -> None:
    """Close all connections of a group, so that whoever waits for this worker stops waiting."""
    with suppress(RuntimeError):
        abort(group)  # NCCL; gloo lets nothing go before a message is overdue
    for peer in range(group.size()):
        if peer != group.rank() and "gloo" in dist.get_backend(group):
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, _HANG_UP_TAG).wait(timedelta(milliseconds=1))


def world() -> ProcessGroup:
    """The group of all processes."""
    everyone = dist.group.WORLD
    assert everyone is not None
    return everyone


def _key(rank: int) -> str:
    return f"stowplan: worker {rank} noticed a loss"
