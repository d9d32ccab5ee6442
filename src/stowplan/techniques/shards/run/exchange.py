"""Exchange: a worker's share of a tensor becomes what it holds; backward, gradients go back and add up."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from stowplan.geometry import Rect
from stowplan.run.parts.part import Index, index_within
from stowplan.techniques.shards.plan.plan import ShardPlan
from stowplan.techniques.shards.run.workers import Workers


@dataclass(frozen=True, slots=True)
class Message:
    """A message to or from a worker: a part of the share, or of the held part."""

    peer: int
    index: Index


@dataclass(frozen=True, slots=True)
class Exchange:
    """The exchange of one tensor, as one worker takes part in it. All rects are over cells."""

    workers: Workers
    share: Rect
    held: Rect
    kept: tuple[Index, Index] | None  # what the worker has itself: where in its share, where in what it holds
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    differentiated: bool

    def forward(self, share: Tensor) -> Tensor:
        """The held part, from the worker's share."""
        sends = [(swap.peer, share[swap.index].contiguous()) for swap in self.sends]
        received = [(swap.peer, _room(share, swap.index)) for swap in self.receives]
        wait = self.workers.swap(sends, received)
        held = share.new_empty(self.held.shape)
        if self.kept is not None:
            held[self.kept[1]].copy_(share[self.kept[0]])
        wait()
        for swap, (_, part) in zip(self.receives, received, strict=True):
            held[swap.index].copy_(part)
        return held

    def backward(self, gradient: Tensor) -> Tensor:
        """The gradient of the share, from that of what is held: the same list reversed, with addition."""
        sends = [(swap.peer, gradient[swap.index].contiguous()) for swap in self.receives]
        received = [(swap.peer, _room(gradient, swap.index)) for swap in self.sends]
        wait = self.workers.swap(sends, received)
        found = self._own_part(gradient)
        wait()
        for swap, (_, part) in zip(self.sends, received, strict=True):
            found[swap.index].add_(part)
        return found

    @property
    def flight_size(self) -> int:
        """How many elements are sent and received."""
        return sum(_size(swap.index) for swap in (*self.receives, *self.sends))

    def begin_backward(self, gradient: Tensor) -> Tensor:
        """Begin the messages of `backward`. All that is sent and received is in the flat tensor returned."""
        sizes = [_size(swap.index) for swap in (*self.receives, *self.sends)]
        flight = gradient.new_empty(sum(sizes))
        rooms = torch.split(flight, sizes)
        leaving, arriving = rooms[: len(self.receives)], rooms[len(self.receives) :]
        for swap, room in zip(self.receives, leaving, strict=True):
            room.view(_shape(swap.index)).copy_(gradient[swap.index])
        sends = [(swap.peer, room) for swap, room in zip(self.receives, leaving, strict=True)]
        received = [(swap.peer, room) for swap, room in zip(self.sends, arriving, strict=True)]
        self.workers.begin_flight(flight, sends, received)
        return flight

    def end_backward(self, gradient: Tensor, flight: Tensor) -> Tensor:
        """What `backward` returns, from the same gradient and the messages that were begun with it."""
        found = self._own_part(gradient)
        self.workers.end_flight(flight)
        first = sum(_size(swap.index) for swap in self.receives)
        for swap in self.sends:
            shape, size = _shape(swap.index), _size(swap.index)
            found[swap.index].add_(flight[first : first + size].view(shape))
            first += size
        return found

    def _own_part(self, gradient: Tensor) -> Tensor:
        """The gradient of the share by what this worker made of it."""
        if self.held.contains(self.share) and self.kept is not None:
            return gradient[self.kept[1]].clone(memory_format=torch.contiguous_format)
        found = gradient.new_zeros(self.share.shape)
        if self.kept is not None:
            found[self.kept[0]].copy_(gradient[self.kept[1]])
        return found


def exchange_of(plan: ShardPlan, workers: Workers, name: str) -> Exchange:
    """How this worker takes part in the exchange of a tensor."""
    rank, layout = workers.rank, plan.layouts[name]
    share = layout.share(plan.mesh, rank)
    held = plan.shards[rank].held.get(name, Rect(share.lo, share.lo))
    own = share.intersect(held)
    receives = [(v, part) for v, part in layout.holders(plan.mesh, rank, held) if v != rank]
    sends = [
        (w, share.intersect(shard.held[name]))
        for w, shard in plan.shards.items()
        if w != rank and name in shard.held and _serves(plan, name, rank, w)
    ]
    return Exchange(
        workers,
        share,
        held,
        None if own.is_empty else (index_within(own, share), index_within(own, held)),
        tuple(Message(w, index_within(part, share)) for w, part in sends if not part.is_empty),
        tuple(Message(v, index_within(part, held)) for v, part in receives),
        name in plan.differentiated,
    )


def _serves(plan: ShardPlan, name: str, source: int, target: int) -> bool:
    """Whether two workers differ only along axes that cut the tensor: each row of replicas serves itself."""
    here, there = plan.mesh.place(source), plan.mesh.place(target)
    axes = plan.layouts[name].axes
    return all(a == b for a, b, cell in zip(here, there, axes, strict=True) if cell is None)


def _room(like: Tensor, index: Sequence[slice]) -> Tensor:
    return like.new_empty(_shape(index))


def _shape(index: Sequence[slice]) -> list[int]:
    return [part.stop - part.start for part in index]


def _size(index: Sequence[slice]) -> int:
    return prod(_shape(index))
