"""Gather: whole parameters from the shards of all workers, and shards of summed gradients from whole ones.

A parameter is divided by rows, its first dim. Every worker has as many rows; those beyond the last are
padding, are zero, and are never sent. Backward, each worker sends each other the rows of its gradient that
belong to the other, and adds up what it receives. A worker that reads a part of a parameter gathers that
part: it receives of each other worker's rows what the part has of them.

Whole parameters are received in their places in one buffer. The messages begin when it is allocated and are
waited for before its first reader; meanwhile the worker may compute something else.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from stowplan.ir import Shape
from stowplan.ops.windows import Span
from stowplan.techniques.shards.plan.parameter_shards import ParameterPart
from stowplan.techniques.shards.run.workers import Workers

_LINE_BYTES = 64  # parameters in a buffer begin at multiples of it, as PyTorch's own allocations do


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

    def span(self, worker: int) -> Span:
        """The rows that belong to a worker."""
        first = min(self._count, worker * self.each)
        return first, min(self._count, first + self.each)

    def count(self, worker: int) -> int:
        """How many rows belong to a worker."""
        first, end = self.span(worker)
        return end - first

    def of(self, whole: Tensor, worker: int) -> Tensor:
        """A worker's rows of a whole parameter: a view."""
        return (whole if self.shape else whole.view(1))[slice(*self.span(worker))]

    def shard(self, whole: Tensor, worker: int) -> Tensor:
        """A worker's shard of a whole parameter."""
        rows, shard = self.of(whole, worker), whole.new_zeros(self.of_shard)
        shard[: len(rows)] = rows
        return shard


@dataclass(frozen=True, slots=True)
class Gather:
    """The parameters that are gathered together, the price of a message, and which part each worker reads.

    `parts` are by parameter and by worker; None for a parameter that all workers read whole.
    """

    workers: Workers
    rows: tuple[Rows, ...]
    latency_seconds: float = 0.0
    bytes_per_second: float = float("inf")
    parts: tuple[tuple[ParameterPart, ...] | None, ...] = ()

    @property
    def peers(self) -> list[int]:
        """The other workers, beginning with the next: no two send to the same one first."""
        size = self.workers.mesh.size
        return [(self.workers.rank + step) % size for step in range(1, size)]

    def parts_of(self, worker: int) -> tuple[ParameterPart, ...]:
        """By parameter the part that a worker reads."""
        parts = self.parts or (None,) * len(self.rows)
        pairs = zip(parts, self.rows, strict=True)
        return tuple(
            ParameterPart.whole(rows.shape) if part is None else part[worker] for part, rows in pairs
        )

    @property
    def has_parts(self) -> bool:
        """Whether a worker reads a part of some parameter."""
        return any(part is not None for part in self.parts)

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of what this worker gathers."""
        pairs = zip(self.parts_of(self.workers.rank), self.rows, strict=True)
        return [part.shape if rows.shape else () for part, rows in pairs]

    def elements(self, source: int, target: int) -> int:
        """What a worker's rows have of another's parts."""
        pairs = zip(self.parts_of(target), self.rows, strict=True)
        return sum(part.elements(rows.span(source)) for part, rows in pairs)

    def sent_elements(self, *, is_backward: bool) -> int:
        """What this worker sends: to others what they read of its rows, or its gradients of their rows."""
        own = self.workers.rank
        return sum(self.elements(*((peer, own) if is_backward else (own, peer))) for peer in self.peers)

    def seconds(self, itemsize: int, *, is_backward: bool, messages: int = 1) -> float:
        """The time of `messages` to each other worker."""
        nbytes = self.sent_elements(is_backward=is_backward) * itemsize
        return messages * len(self.peers) * self.latency_seconds + nbytes / self.bytes_per_second

    def buffer_elements(self, itemsize: int) -> int:
        """The size of the buffer for whole parameters. With a line more, it is no parameter itself."""
        return self._starts(itemsize)[-1] + _LINE_BYTES // itemsize

    def _starts(self, itemsize: int) -> list[int]:
        """Where in the buffer each parameter begins, and where the last one ends."""
        line = _LINE_BYTES // itemsize
        return list(accumulate((-(-prod(rows.shape) // line) * line for rows in self.rows), initial=0))

    def wholes(self, buffer: Tensor) -> list[Tensor]:
        """The parameters in a buffer: views."""
        pairs = zip(self._starts(buffer.itemsize)[:-1], self.rows, strict=True)
        return [buffer[at : at + prod(rows.shape)].view(rows.shape) for at, rows in pairs]

    def begin(self, shards: Sequence[Tensor]) -> Tensor:
        """A buffer for whole parameters, which has this worker's rows; those of others begin to arrive."""
        own, buffer = self.workers.rank, shards[0].new_empty(self.buffer_elements(shards[0].itemsize))
        sends, receives = list[tuple[int, Tensor]](), list[tuple[int, Tensor]]()
        for shard, whole, rows in zip(shards, self.wholes(buffer), self.rows, strict=True):
            mine = shard[: rows.count(own)]
            rows.of(whole, own).copy_(mine)
            sends += ((peer, mine) for peer in self.peers if mine.numel())
            rooms = ((peer, rows.of(whole, peer)) for peer in self.peers)
            receives += ((peer, room) for peer, room in rooms if room.numel())
        self.workers.begin_flight(buffer, sends, receives)
        return buffer

    def end(self, buffer: Tensor) -> list[Tensor]:
        """The whole parameters, once all rows have arrived. A plan may ask for some of them later again."""
        if self.workers.is_under_way(buffer):
            self.workers.end_flight(buffer)
        return self.wholes(buffer)

    def forward(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """This worker's parts of the parameters. A single piece of one is received in its place."""
        own = self.workers.rank
        made = [s.new_empty(part.shape) for s, part in zip(shards, self.parts_of(own), strict=True)]
        messages: dict[tuple[ParameterPart, ...], Tensor] = {}  # workers that read the same receive the same
        for peer in self.peers:
            parts = self.parts_of(peer)
            if parts not in messages:
                messages[parts] = self._packed([shard[at] for shard, at, _ in self._met(shards, own, peer)])
        received = {peer: self._room(made, peer) for peer in self.peers}
        wait = self.workers.swap(
            [(p, messages[parts]) for p in self.peers if messages[parts := self.parts_of(p)].numel()],
            [(peer, room) for peer, room in received.items() if room.numel()],
        )
        for number, (part, rows) in enumerate(zip(self.parts_of(own), self.rows, strict=True)):
            for at, to in part.blocks(rows.span(own)):
                made[number][to].copy_(shards[number][at])
        wait()
        in_place = {each.untyped_storage().data_ptr() for each in made}
        for peer, flat in received.items():
            if flat.numel() and flat.untyped_storage().data_ptr() not in in_place:
                self._unpacked(flat, [whole[at] for whole, _, at in self._met(made, peer, own)])
        given = {*in_place, *(shard.untyped_storage().data_ptr() for shard in shards)}
        _end(
            t for t in (*messages.values(), *received.values()) if t.untyped_storage().data_ptr() not in given
        )
        return [each.view(shape) for each, shape in zip(made, self.shapes, strict=True)]

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The shards of the sums over all workers, from this worker's gradients of the parts it reads."""
        own, size = self.workers.rank, self.workers.mesh.size
        parts = self.parts_of(own)
        gradients = [g.reshape(part.shape) for g, part in zip(gradients, parts, strict=True)]
        given = {gradient.untyped_storage().data_ptr() for gradient in gradients}
        found = [g.new_zeros(rows.of_shard) for g, rows in zip(gradients, self.rows, strict=True)]
        for number, (part, rows) in enumerate(zip(parts, self.rows, strict=True)):
            for at, to in part.blocks(rows.span(own)):
                found[number][at].copy_(gradients[number][to])
        for step in range(1, size):
            target, source = (own + step) % size, (own - step) % size
            sent = self._packed([gradient[at] for gradient, _, at in self._met(gradients, target, own)])
            received = gradients[0].new_empty(self.elements(own, source))
            wait = self.workers.swap(
                [(target, sent)] if sent.numel() else [], [(source, received)] if received.numel() else []
            )
            wait()
            self._unpacked(received, [s[at] for s, at, _ in self._met(found, own, source)], adds=True)
            _end([received] if sent.untyped_storage().data_ptr() in given else [received, sent])
        return found

    def _met(
        self, tensors: Sequence[Tensor], source: int, target: int
    ) -> list[tuple[Tensor, tuple[slice, ...], tuple[slice, ...]]]:
        """Blocks that one worker's rows have of another's parts: where in the rows, and where in the part."""
        triples = zip(tensors, self.parts_of(target), self.rows, strict=True)
        return [
            (tensor, at, to) for tensor, part, rows in triples for at, to in part.blocks(rows.span(source))
        ]

    @staticmethod
    def _packed(blocks: Sequence[Tensor]) -> Tensor:
        """Blocks as one message: a single one as it is, if its memory is in one piece."""
        if len(blocks) == 1:
            return blocks[0].contiguous()
        return torch.cat([block.reshape(-1) for block in blocks]) if blocks else torch.empty(0)

    @staticmethod
    def _unpacked(flat: Tensor, blocks: Sequence[Tensor], *, adds: bool = False) -> None:
        """Write a message to the blocks that it is of, or add it to them."""
        for block, values in zip(blocks, torch.split(flat, [b.numel() for b in blocks]), strict=True):
            (block.add_ if adds else block.copy_)(values.view(block.shape))

    def _room(self, made: Sequence[Tensor], peer: int) -> Tensor:
        """Where what another worker sends is received."""
        met = self._met(made, peer, self.workers.rank)
        if len(met) == 1 and met[0][0][met[0][2]].is_contiguous():
            return met[0][0][met[0][2]]
        return made[0].new_empty(self.elements(peer, self.workers.rank))


def _end(buffers: Iterable[Tensor]) -> None:
    """Free these now: gloo's thread keeps its reference for a while after the wait."""
    for buffer in buffers:
        buffer.untyped_storage().resize_(0)
