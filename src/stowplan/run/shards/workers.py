"""Workers: the processes of a mesh as this one sees them, and all that they say to each other.

Transport is torch.distributed's: batched point-to-point for exchanges, all-reduce for sums. Every message is
counted, so that what was sent can be held against what was projected.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup

from stowplan.errors import BadUse, WorkerLost
from stowplan.plan.shards.mesh import Mesh


class Workers:
    """A mesh on the processes of torch.distributed, one each, in the order of their ranks."""

    def __init__(self, mesh: Mesh) -> None:
        if not dist.is_initialized() or dist.get_world_size() != mesh.size:
            there = dist.get_world_size() if dist.is_initialized() else 0
            raise BadUse(f"mesh {mesh} has {mesh.size} workers, but {there} processes are connected")
        self.mesh, self.rank = mesh, dist.get_rank()
        self.step = 0  # how many steps were begun
        self.sent_bytes = 0  # point to point
        self.summed_bytes = 0  # handed to all-reduce
        self._is_rehearsal = False
        self._sums: dict[int, dist.Work] = {}  # begun and not ended, by where they are in memory
        self._others: dict[tuple[int, ...], tuple[int, ...]] = {}  # by axes that sums run over
        self._groups: dict[tuple[int, ...], ProcessGroup | None] = {}

    def join(self, axes: Iterable[tuple[int, ...]]) -> None:
        """Make the groups that sums run over. All workers must come here, with the same axes."""
        for wanted in sorted(set(axes) - self._groups.keys()):
            row = self.mesh.along(self.rank, wanted)
            self._others[wanted] = tuple(worker for worker in row if worker != self.rank)
            rows = sorted({self.mesh.along(worker, wanted) for worker in range(self.mesh.size)})
            if len(rows) == 1:
                self._groups[wanted] = None  # everyone: the group there is
                continue
            for row in rows:
                group = dist.new_group(row)
                if self.rank in row:
                    self._groups[wanted] = group

    def swap(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Callable[[], None]:
        """Begin to send tensors to workers and to fill others, all at once; what is returned waits for it."""
        transfers = [P2POp(dist.irecv, _plain(tensor), peer) for peer, tensor in receives]
        transfers += [P2POp(dist.isend, _plain(tensor), peer) for peer, tensor in sends]
        if self._is_rehearsal:
            return lambda: None
        self.sent_bytes += sum(tensor.nbytes for _, tensor in sends)
        return partial(self._wait, self._begun(transfers), transfers)

    def _wait(self, works: list[dist.Work], transfers: list[P2POp]) -> None:
        for work, transfer in zip(works, transfers, strict=False):  # NCCL has one for all
            with self._naming_who_is_lost((transfer.peer,)):
                work.wait()

    def _begun(self, transfers: list[P2POp]) -> list[dist.Work]:
        if not transfers:
            return []
        with self._naming_who_is_lost(tuple(dict.fromkeys(transfer.peer for transfer in transfers))):
            return dist.batch_isend_irecv(transfers)

    def add_up(self, tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
        """The sum over all workers along these axes, the same bits on each."""
        total = tensor.clone(memory_format=torch.contiguous_format)
        if self._is_rehearsal:
            return total
        self.summed_bytes += total.nbytes
        with self._naming_who_is_lost(self._others[axes]):
            dist.all_reduce(total, group=self._groups[axes])
        return total

    def begin_sum(self, tensor: Tensor, axes: tuple[int, ...]) -> None:
        """Begin to turn a tensor into its sum over the workers along these axes, unseen until it ends."""
        if self._is_rehearsal:
            return
        self.summed_bytes += tensor.nbytes
        with self._naming_who_is_lost(self._others[axes]):
            work = dist.all_reduce(tensor, group=self._groups[axes], async_op=True)
        assert work is not None
        self._sums[tensor.data_ptr()] = work

    def end_sum(self, tensor: Tensor, axes: tuple[int, ...]) -> None:
        """Wait until a tensor is the sum that was begun with it."""
        if not self._is_rehearsal:
            with self._naming_who_is_lost(self._others[axes]):
                self._sums.pop(tensor.data_ptr()).wait()

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Within, nothing is sent: this worker tries by itself what its part in a talk costs."""
        self._is_rehearsal = True
        try:
            yield
        finally:
            self._is_rehearsal = False

    @contextmanager
    def _naming_who_is_lost(self, suspects: tuple[int, ...]) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, dist.DistError) as fault:
            named = f"worker {suspects[0]}" if len(suspects) == 1 else f"one of workers {suspects}"
            raise WorkerLost(
                f"worker {self.rank} lost touch with {named} in step {self.step}: {_first_line(fault)};"
                " parameters are those of the last completed step: restart from its checkpoint",
                rank=self.rank,
                step=self.step,
                suspects=suspects,
            ) from fault


def _plain(tensor: Tensor) -> Tensor:
    """As bytes where gloo knows no such element."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


def _first_line(fault: Exception) -> str:
    return str(fault).strip().split("\n")[0]
