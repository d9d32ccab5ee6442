"""Gather: whole parameters from the shards of all workers, and shards of summed gradients from whole ones.

A parameter is divided by rows, its first dim. Every worker has as many rows; those beyond the last are
padding, are zero, and are never sent. Backward, each worker sends each other the rows of its gradient that
belong to the other, and adds up what it receives.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from stowplan.ir import Shape
from stowplan.run.shards.workers import Workers


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a parameter of this shape, divided over a number of workers."""

    shape: Shape
    workers: int

    @property
    def each(self) -> int:
        """The rows of a shard, padding included."""
        return -(-self._count // self.workers)

    @property
    def _count(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def of_shard(self) -> Shape:
        """The shape of a shard."""
        return (self.each, *self.shape[1:])

    def span(self, worker: int) -> slice:
        """The rows that belong to a worker."""
        first = min(self._count, worker * self.each)
        return slice(first, first + self.count(worker))

    def count(self, worker: int) -> int:
        """How many rows belong to a worker."""
        first, end = (min(self._count, number * self.each) for number in (worker, worker + 1))
        return end - first

    def elements(self, worker: int) -> int:
        """Of the rows that belong to a worker."""
        return self.count(worker) * prod(self.shape[1:])

    def of(self, whole: Tensor, worker: int) -> Tensor:
        """A worker's rows of a whole parameter: a view."""
        return (whole if self.shape else whole.view(1))[self.span(worker)]

    def shard(self, whole: Tensor, worker: int) -> Tensor:
        """A worker's shard of a whole parameter."""
        rows, shard = self.of(whole, worker), whole.new_zeros(self.of_shard)
        shard[: len(rows)] = rows
        return shard


@dataclass(frozen=True, slots=True)
class Gather:
    """The parameters that are gathered together, and the price of a message."""

    workers: Workers
    rows: tuple[Rows, ...]
    latency_seconds: float = 0.0
    bytes_per_second: float = float("inf")

    @property
    def peers(self) -> list[int]:
        """The other workers, beginning with the next: no two send to the same one first."""
        size = self.workers.mesh.size
        return [(self.workers.rank + step) % size for step in range(1, size)]

    def sent_elements(self, *, is_backward: bool) -> int:
        """What this worker sends: its own rows to all others, or to each of the others its rows."""
        own = self.workers.rank
        return sum(rows.elements(peer if is_backward else own) for rows in self.rows for peer in self.peers)

    def seconds(self, itemsize: int, *, is_backward: bool) -> float:
        """The time of the messages."""
        nbytes = self.sent_elements(is_backward=is_backward) * itemsize
        return len(self.peers) * self.latency_seconds + nbytes / self.bytes_per_second

    def forward(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The whole parameters. A single one is received in its place; several travel in one message."""
        own = self.workers.rank
        wholes = [s.new_empty(rows.shape) for s, rows in zip(shards, self.rows, strict=True)]
        sent = self._packed([shard[: rows.count(own)] for shard, rows in self._with_rows(shards)])
        received = {peer: self._room(wholes, peer) for peer in self.peers}
        wait = self.workers.swap(
            [(peer, sent) for peer in self.peers if sent.numel()],
            [(peer, part) for peer, part in received.items() if part.numel()],
        )
        for shard, whole, rows in zip(shards, wholes, self.rows, strict=True):
            part = rows.of(whole, own)
            part.copy_(shard[: len(part)])
        wait()
        if len(wholes) > 1:
            for peer, flat in received.items():
                parts = [rows.of(whole, peer) for whole, rows in self._with_rows(wholes)]
                for part, values in zip(parts, torch.split(flat, [p.numel() for p in parts]), strict=True):
                    part.copy_(values.view(part.shape))
            _end([sent, *received.values()])
        return wholes

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The shards of the sums over all workers, from this worker's gradients of the whole parameters."""
        own, size = self.workers.rank, self.workers.mesh.size
        pairs = self._with_rows(gradients)
        given = {gradient.untyped_storage().data_ptr() for gradient in gradients}
        found = [rows.shard(gradient, own) for gradient, rows in pairs]
        for step in range(1, size):
            target, source = (own + step) % size, (own - step) % size
            sent = self._packed([rows.of(gradient, target) for gradient, rows in pairs])
            received = gradients[0].new_empty(sum(rows.elements(own) for rows in self.rows))
            wait = self.workers.swap(
                [(target, sent)] if sent.numel() else [], [(source, received)] if received.numel() else []
            )
            wait()
            parts = torch.split(received, [rows.elements(own) for rows in self.rows])
            for shard, rows, part in zip(found, self.rows, parts, strict=True):
                mine = shard[: rows.count(own)]
                mine.add_(part.view(mine.shape))
            _end([received] if sent.untyped_storage().data_ptr() in given else [received, sent])
        return found

    def _with_rows(self, tensors: Iterable[Tensor]) -> list[tuple[Tensor, Rows]]:
        return list(zip(tensors, self.rows, strict=True))

    @staticmethod
    def _packed(parts: Sequence[Tensor]) -> Tensor:
        """Parts as one message: a single one as it is, if its memory is in one piece."""
        return parts[0].contiguous() if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])

    def _room(self, wholes: Sequence[Tensor], peer: int) -> Tensor:
        """Where the rows of another worker are received."""
        if len(wholes) == 1:
            return self.rows[0].of(wholes[0], peer)
        return wholes[0].new_empty(sum(rows.elements(peer) for rows in self.rows))


def _end(buffers: Iterable[Tensor]) -> None:
    """Free these now: gloo's thread keeps its reference for a while after the wait."""
    for buffer in buffers:
        buffer.untyped_storage().resize_(0)
