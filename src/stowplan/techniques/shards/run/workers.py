"""Workers: the processes of a mesh as this one sees them, and all that they say to each other.

Transport is torch.distributed's: batched point-to-point for exchanges, all-reduce for sums. Every message is
counted, so that what was sent can be held against what was projected.

Gloo's own threads: they may not take a core from the thread that computes and sends.

A message wakes the thread that serves gloo's sockets. Where all cores are at work, the kernel gives it the
core of the thread that is just sending, which holds the lock of the connection; it then asks for that lock
again and again until its time is up. As a batch thread it waits until a core is free or its turn comes.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from stowplan.errors import WorkerLost
from stowplan.techniques.shards.run.processes import MeshLike, processes_of
from stowplan.techniques.shards.run.roll_call import forget_losses, lost_among, world
from stowplan.torch_private import timeout_of

_SERVING = "gloo_tcp_loop"


def let_computing_go_on() -> None:
    """Make the threads that serve sockets, as many as there are by now, wait for their turn."""
    if sys.platform != "linux":
        return
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread may end, and a container may forbid it: then it is as before
            if (task / "comm").read_text(encoding="utf-8").strip() == _SERVING:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


class Workers:
    """A mesh on processes of torch.distributed, one each. `rank` is this one's number among the workers."""

    def __init__(self, mesh: MeshLike) -> None:
        processes = processes_of(mesh)
        self.mesh, self.rank = processes.mesh, processes.worker
        self.step = 0  # how many steps were begun
        self.sent_bytes = 0  # point to point
        self.summed_bytes = 0  # handed to all-reduce
        self._before: list[tuple[Tensor, Tensor]] = []  # buffers, and what was in them before the step
        self.is_rehearsal = False  # nothing is sent
        self._sums: dict[int, dist.Work] = {}  # begun and not ended, by where they are in memory
        self._flights: dict[int, tuple[Tensor, Callable[[], None]]] = {}  # likewise; each with its wait
        self._others: dict[tuple[int, ...], tuple[int, ...]] = {}  # their ranks, by axes that sums run over
        self._ranks = processes.ranks
        self._groups: dict[tuple[int, ...], ProcessGroup | None] = {**processes.groups}
        self.everyone = tuple(range(len(self.mesh.axes)))
        self.join([self.everyone])
        forget_losses(self._ranks[self.rank])

    def join(self, axes: Iterable[tuple[int, ...]]) -> None:
        """Make the groups that sums run over. All workers must come here, with the same axes."""
        for wanted in sorted(set(axes) - self._others.keys()):
            row = self.mesh.along(self.rank, wanted)
            self._others[wanted] = tuple(self._ranks[worker] for worker in row if worker != self.rank)
            if wanted not in self._groups:
                self._groups[wanted] = self._group_of([self._ranks[worker] for worker in row])
        let_computing_go_on()  # each group has a thread of its own

    def _group_of(self, ranks: list[int]) -> ProcessGroup | None:
        if len(ranks) == dist.get_world_size():
            return None  # everyone: the group there is
        patience = timeout_of(world())  # a new group has a default of its own: half an hour
        group: ProcessGroup = dist.new_group(ranks, timeout=patience, use_local_synchronization=True)
        return group

    def begin(self, changing: Iterable[Tensor]) -> None:
        """The next step, which changes these buffers; if a worker is lost in it, they are as before."""
        self._end_flights()
        self.step += 1
        self._before = [(buffer, buffer.detach().clone()) for buffer in changing]

    def swap(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Callable[[], None]:
        """Begin to send tensors to workers and to fill others, all at once; what is returned waits for it."""
        if self.is_rehearsal:
            return lambda: None
        transfers = [self._transfer(dist.irecv, tensor, peer) for peer, tensor in receives]
        transfers += [self._transfer(dist.isend, tensor, peer) for peer, tensor in sends]
        self.sent_bytes += sum(tensor.nbytes for _, tensor in sends)
        return partial(self._wait, self._begun(transfers), transfers)

    def begin_flight(
        self, flight: Tensor, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> None:
        """Begin a swap of parts of `flight`, which stays in memory until its end, whoever frees it."""
        if not self.is_rehearsal and flight.numel():
            self._flights[flight.data_ptr()] = flight, self.swap(sends, receives)

    def is_under_way(self, flight: Tensor) -> bool:
        """Whether messages were begun with `flight` and not waited for."""
        return flight.data_ptr() in self._flights

    def end_flight(self, flight: Tensor) -> None:
        """Wait until all that was begun with `flight` has arrived; else nobody may read it."""
        if self.is_rehearsal or not flight.numel():
            return
        begun = self._flights.pop(flight.data_ptr(), None)
        if begun is None:
            raise RuntimeError(f"no messages were begun in this buffer of {flight.nbytes} bytes")
        begun[1]()

    def _end_flights(self) -> None:
        """Those of a backward that was not run to its end, for which the other workers wait as well."""
        while self._flights:
            self._flights.popitem()[1][1]()

    def _transfer(self, way: Callable[..., dist.Work | None], tensor: Tensor, peer: int) -> P2POp:
        return P2POp(way, _plain(tensor), self._ranks[peer], self._groups[self.everyone])

    def _wait(self, works: list[dist.Work], transfers: list[P2POp]) -> None:
        for work, transfer in zip(works, transfers, strict=False):  # NCCL has one for all
            with self._in_step((transfer.peer,)):
                work.wait()

    def _begun(self, transfers: list[P2POp]) -> list[dist.Work]:
        if not transfers:
            return []
        with self._in_step(tuple(dict.fromkeys(transfer.peer for transfer in transfers))):
            return dist.batch_isend_irecv(transfers)

    def add_up(self, tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
        """The sum over all workers along these axes, the same bits on each."""
        return self._reduced(tensor, axes, dist.ReduceOp.SUM)

    def greatest(self, tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Element by element the greatest of all workers along these axes."""
        return self._reduced(tensor, axes, dist.ReduceOp.MAX)

    def _reduced(self, tensor: Tensor, axes: tuple[int, ...], how: Any) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        if not self.is_rehearsal:
            self.summed_bytes += total.nbytes
            with self._in_step(self._others[axes]):
                dist.all_reduce(total, how, group=self._groups[axes])
        found = total.clone()
        total.untyped_storage().resize_(0)  # gloo's thread keeps its reference for a while after the wait
        return found

    def begin_sum(self, tensor: Tensor, axes: tuple[int, ...]) -> None:
        """Begin to turn a tensor into its sum over the workers along these axes, unseen until it ends."""
        if self.is_rehearsal:
            return
        self.summed_bytes += tensor.nbytes
        with self._in_step(self._others[axes]):
            work = dist.all_reduce(tensor, group=self._groups[axes], async_op=True)
        assert work is not None
        self._sums[tensor.data_ptr()] = work

    def end_sum(self, tensor: Tensor, axes: tuple[int, ...]) -> None:
        """Wait until a tensor is the sum that was begun with it."""
        if not self.is_rehearsal:
            with self._in_step(self._others[axes]):
                self._sums.pop(tensor.data_ptr()).wait()

    def all_gather(self, numbers: Sequence[float], device: torch.device) -> list[list[float]]:
        """The numbers of each worker, by worker. Not part of a step, so its bytes are not counted."""
        gathered = torch.zeros(self.mesh.size, len(numbers), dtype=torch.float64, device=device)
        gathered[self.rank] = torch.tensor(numbers, dtype=torch.float64)
        with self.naming_who_is_lost():
            dist.all_reduce(gathered, group=self._groups[self.everyone])
        found: list[list[float]] = gathered.tolist()
        return found

    def norm(self, own: Tensor) -> Tensor:
        """The norm of what all workers have together, from the norm of this one's."""
        return self.add_up(own.double().square(), self.everyone).sqrt().to(own.dtype)

    def device_mesh(self, device: torch.device) -> DeviceMesh:
        """The workers as PyTorch's mesh of one dim. All workers must come here."""
        return DeviceMesh(device.type, list(self._ranks))

    def from_first(self, value: object) -> Any:
        """What the first worker gives, on all of them. Not part of a step."""
        given = [value]
        with self.naming_who_is_lost():
            dist.broadcast_object_list(given, src=self._ranks[0], group=self._groups[self.everyone])
        return given[0]

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Inside this context nothing is sent: the worker probes its own part of each collective."""
        self.is_rehearsal = True
        try:
            yield
        finally:
            self.is_rehearsal = False

    @contextmanager
    def naming_who_is_lost(self, suspects: tuple[int, ...] = ()) -> Iterator[None]:
        """Turn a failed connection into `WorkerLost`; `suspects` are the workers at its other end."""
        try:
            yield
        except (RuntimeError, dist.DistError) as fault:
            raise self._lost(suspects, _first_line(fault)) from fault

    @contextmanager
    def _in_step(self, suspects: tuple[int, ...]) -> Iterator[None]:
        try:
            with self.naming_who_is_lost(suspects):
                yield
        except WorkerLost:
            self._give_back()
            raise

    def _give_back(self) -> None:
        with torch.no_grad():
            for buffer, before in self._before:
                buffer.copy_(before)
        self._before, self._sums, self._flights = [], {}, {}

    def _lost(self, suspects: tuple[int, ...], why: str) -> WorkerLost:
        rank, others = self._ranks[self.rank], self._others[self.everyone]
        groups = [group or world() for group in self._groups.values()]
        lost = lost_among(rank, others, suspects or others, groups)
        named = f"worker {lost[0]}" if len(lost) == 1 else f"workers {', '.join(map(str, lost))}"
        return WorkerLost(
            f"worker {rank} lost touch with {named} in step {self.step}: {why};"
            " parameters are those of the last completed step: restart from its checkpoint",
            rank=rank,
            step=self.step,
            suspects=lost,
        )


def _plain(tensor: Tensor) -> Tensor:
    """As bytes where gloo knows no such element."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


def _first_line(fault: Exception) -> str:
    return str(fault).strip().split("\n")[0]
