"""Sweep: a segment run tile by tile, forward and backward, with exact gradients.

The tiles partition the segment's output, so that the gradients of what they read, parameters and overlapping
parts of inputs alike, simply add up. Statistics of a whole tensor, such as batch norm's, are gathered in a
round of their own before the tiles that need them; backward, they are inputs like any other, whose gradients
add up over the tiles and are then handed on to what they were gathered of, in the rounds' reverse order.

Sums: gradients of what tiles read, added up as soon as autograd has them, in float32 or wider.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from hashlib import sha256
from types import MappingProxyType

import torch
from torch import Tensor

from stowplan.capture import Call, Handle
from stowplan.geometry import Rect
from stowplan.ir import Op
from stowplan.ir import Tensor as Described
from stowplan.ops.table import shape_of
from stowplan.run.cost.machine import in_memory
from stowplan.run.parts.losses import TiledLoss, tiled_loss
from stowplan.run.parts.part import Index, empty_like_described
from stowplan.techniques.tiles.plan.buffer_reuse import buffers_reused
from stowplan.techniques.tiles.plan.rects import TileLevels
from stowplan.techniques.tiles.plan.rematerialise import RematerialisedInputs, tiles_before
from stowplan.techniques.tiles.plan.rounds import Round, rounds_of
from stowplan.techniques.tiles.plan.segment import Segment
from stowplan.techniques.tiles.run.gathering import Gathering, gathering_of
from stowplan.techniques.tiles.run.local import TileRun, local_step
from stowplan.torch_private import autograd_in_kernels


class Sums:
    """A segment's inputs as autograd leaves of one tile after another, and the sums of their gradients."""

    def __init__(
        self,
        given: Mapping[str, Tensor],
        wanted: Mapping[str, Tensor],
        places: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Gradients are `wanted` of what looks like this, with contents or without.

        `places` are for sums that tiles clear part by part, each before anything is added to it.
        """
        self._given, self._wanted = given, wanted
        device = next(iter(given.values())).device
        own = (name for name in wanted if name not in (places or {}))
        self._sums = {**(places or {}), **{name: _zeros_like(wanted[name], device) for name in own}}

    def clear(self, name: str, index: Index) -> None:
        """Begin a part of a sum."""
        self._sums[name][index].zero_()

    def leaves(self, tile: TileRun) -> dict[str, Tensor]:
        """The parts that a tile reads. The gradient of a part is added to its sum and freed."""
        made = tile.made_before(self._given)
        return {
            name: self._leaf(name, index, made.pop(name) if name in made else self._given[name][index])
            for name, index in tile.reads.items()
        }

    def _leaf(self, name: str, index: Index, part_read: Tensor) -> Tensor:
        leaf = part_read.detach()
        if name not in self._sums:
            return leaf
        leaf.requires_grad_()
        part = self._sums[name][index]

        def add(arrived: Tensor) -> None:
            part.add_(arrived.grad)  # type: ignore[arg-type]  # there is one when the hook is called
            arrived.grad = None

        leaf.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
        return leaf

    def add(self, name: str, gradient: Tensor) -> None:
        """Add to a sum, if it is wanted."""
        if name in self._sums:
            self._sums[name].add_(gradient)

    def of(self, names: Iterable[str]) -> list[Tensor]:
        """The sums so far."""
        return [self._sums[name] for name in names]

    def totals(self, names: Iterable[str], scale: float = 1.0) -> list[Tensor]:
        """The sums, in the dtype of what they are the gradients of."""
        wanted = {name: self._sums[name] for name in names}
        for total in wanted.values():
            if scale != 1.0:
                total.mul_(scale)
        return [total.to(self._wanted[name].dtype) for name, total in wanted.items()]


def differentiate(ends: dict[str, Tensor], incoming: Sequence[Tensor]) -> None:
    """Run autograd from the ends, which it alone holds from then on."""
    pairs = [(end, grad) for end, grad in zip(ends.values(), incoming, strict=True) if end.requires_grad]
    ends.clear()
    if pairs:
        torch.autograd.backward([end for end, _ in pairs], [grad for _, grad in pairs])


@contextmanager
def differentiating() -> Iterator[None]:
    """Autograd on, also inside the kernel of a custom op, where PyTorch has switched it off."""
    with autograd_in_kernels(), torch.enable_grad():
        yield


def _zeros_like(tensor: Tensor, device: torch.device) -> Tensor:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return in_memory(torch.empty_like(tensor, dtype=dtype, device=device)).zero_()


@dataclass(frozen=True, slots=True)
class LocalRound:
    """Tiles, and the statistics that are gathered of what they write.

    A maker prepares its tile when the tile first runs, because a probe runs only a few tiles.
    """

    makers: tuple[Callable[[], TileRun], ...]
    gatherings: tuple[Gathering, ...]

    @property
    def tiles(self) -> Iterator[TileRun]:
        return (make() for make in self.makers)

    def gather(self, given: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """The statistics by name."""
        begun = [gathering.begun(device) for gathering in self.gatherings]
        for tile in self.tiles:
            parts = tile.run({name: given[name][index] for name, index in tile.reads.items()})
            for gathering, gathered in zip(self.gatherings, begun, strict=True):
                if gathering.source in parts:
                    gathered.add(parts[gathering.source], gathering.place(tile.rects[gathering.source]))
            parts.clear()  # before the next tile makes its own
        return {
            name: statistic
            for gathering, gathered in zip(self.gatherings, begun, strict=True)
            for name, statistic in zip(gathering.names, gathered.statistics(given), strict=True)
        }

    def hand_on(self, given: Mapping[str, Tensor], sums: Sums) -> None:
        """Differentiate what the statistics were gathered of."""
        with torch.no_grad():
            for gathering in self.gatherings:
                for name, gradient in gathering.handed_back(given, sums.of(gathering.names)).items():
                    sums.add(name, gradient)
        for tile in self.tiles:
            self._hand_on(tile, given, sums)

    def _hand_on(self, tile: TileRun, given: Mapping[str, Tensor], sums: Sums) -> None:
        parts = tile.run(sums.leaves(tile))
        ends, gradients = {}, []
        for gathering in (each for each in self.gatherings if each.source in parts):
            part = parts[gathering.source]
            place = gathering.place(tile.rects[gathering.source])
            known = [given[name] for name in gathering.names]
            gradients.append(gathering.gradient(part.detach(), place, known, sums.of(gathering.names)))
            ends[gathering.names[0]] = part
        parts.clear()
        differentiate(ends, gradients)

    def behind(self, before: Sequence[Callable[[], TileRun | None]]) -> "LocalRound":
        """The same with something that makes what a tile reads before each."""
        pairs = zip(self.makers, before, strict=True)
        return replace(self, makers=tuple(cache(partial(_after, *pair)) for pair in pairs))

    def only(self, tiles: Sequence[int]) -> "LocalRound":
        """Some of its tiles, by number."""
        return replace(self, makers=tuple(self.makers[number] for number in tiles))


def _after(make: Callable[[], TileRun], before: Callable[[], TileRun | None]) -> TileRun:
    return replace(make(), before=before())


class Sweep(Handle):
    """A segment on a grid, with the calls that compute it. Inputs and outputs are in the segment's order.

    `given` are statistics that other sweeps have gathered. `reads` are the tensors, and `known` the
    statistics, that must exist when the sweep runs. `before` has, by pass, the tiles of the segment `remat`
    that recompute the inputs of each tile, if inputs are rematerialised.
    """

    def __init__(
        self,
        segment: Segment,
        calls: Mapping[str, Call],
        parts: Sequence[int],
        given: Mapping[str, Gathering] = MappingProxyType({}),
    ) -> None:
        self.segment, self.parts = segment, tuple(parts)
        self.rounds = rounds_of(segment, parts)
        self.gatherings = {
            op.id: gathering_of(segment, op, of_round.products.get(op.id))
            for of_round in self.rounds
            for op in of_round.statistics
        }
        known = {**given, **self.gatherings}
        *self._rounds, self._last = (_local_round(of_round, calls, known) for of_round in self.rounds)
        self._reused = buffers_reused(self.rounds[-1])
        self._loss: TiledLoss | None = None if segment.loss is None else tiled_loss(calls[segment.loss.id])
        name = _name_of(segment, self.parts)
        super().__init__(name, title=name, likeness=_likeness_of(self.parts, segment.inputs, segment))
        self.reads, self.known = segment.inputs, (*self.statistics, *_known_in(segment, given))
        self.remat: Segment | None = None
        self.before: tuple[tuple[TileLevels | None, ...], ...] = ((),) * len(self.rounds)

    def only(self, tiles: Sequence[Sequence[int]]) -> "Sweep":
        """The same sweep over some tiles, by number for each pass: a probe of their cost, without results."""
        some = copy(self)
        rounds = zip((*self._rounds, self._last), tiles, strict=True)
        *some._rounds, some._last = (of_round.only(numbers) for of_round, numbers in rounds)
        some.identify(f"{self.name}, of which {[list(numbers) for numbers in tiles]}")
        return some

    def rematerialising(
        self, remat: RematerialisedInputs, calls: Mapping[str, Call], given: Mapping[str, Gathering]
    ) -> "Sweep":
        """The same sweep with a backward that recomputes inputs in parts; `given` has their statistics."""
        made = remat.in_parts
        assert made is not None, "nothing is made in parts"
        some = copy(self)
        some.reads = remat.read
        some.known = tuple(dict.fromkeys((*self.known, *_known_in(made, given))))
        some.identify(
            f"{self.name}, of {', '.join(remat.kept)} ({_digest(made)})",
            _likeness_of(self.parts, some.reads, self.segment, made),
        )
        some.remat, some.before = made, tuple(tiles_before(of_round, made) for of_round in self.rounds)
        *some._rounds, some._last = (
            local.behind([partial(_before, tile, made, calls, given) for tile in tiles])
            for local, tiles in zip((*self._rounds, self._last), some.before, strict=True)
        )
        return some

    @property
    def outputs(self) -> tuple[Described, ...]:
        """Descriptions of the outputs."""
        return tuple(self.segment.graph.tensors[name] for name in self.segment.outputs)

    @property
    def statistics(self) -> tuple[str, ...]:
        """The names of the statistics that it gathers."""
        return tuple(name for gathering in self.gatherings.values() for name in gathering.names)

    @property
    def looks_at(self) -> tuple[str, ...]:
        """The inputs that the statistics depend on."""
        read = {name for of_round in self.rounds[:-1] for name in of_round.segment.inputs}
        return tuple(name for name in self.segment.inputs if name in read)

    def gather(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """All statistics, in their order, one round after the other, of the inputs that it looks at."""
        given = dict(zip(self.looks_at, inputs, strict=True))
        with torch.no_grad():
            for of_round in self._rounds:
                given |= of_round.gather(given, inputs[0].device)
        return [given[name] for name in self.statistics]

    def forward(
        self, inputs: Sequence[Tensor], statistics: Sequence[Tensor] = (), over: Sequence[int] = ()
    ) -> list[Tensor]:
        """The outputs, written tile by tile, in the place of inputs where `over` says so."""
        given = self._given(inputs, statistics)
        places = {out.id: inputs[place] for out, place in zip(self.outputs, over, strict=False) if place >= 0}
        own = (tensor for tensor in self.outputs if tensor.id not in places)
        device = inputs[0].device
        places |= {tensor.id: in_memory(empty_like_described(tensor, device)) for tensor in own}
        with torch.no_grad():
            for tile in self._last.tiles:
                parts = tile.run({name: given[name][index] for name, index in tile.reads.items()})
                for name, index in tile.writes.items():
                    places[name][index].copy_(parts[name])
                parts.clear()  # before the next tile makes its own
        return [places[tensor.id] for tensor in self.outputs]

    def backward(
        self,
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        wanted: Sequence[int],
        statistics: Sequence[Tensor] = (),
        over: Sequence[int] = (),
        *,
        in_place: bool = False,
    ) -> list[Tensor]:
        """The gradients of the inputs at positions `wanted`: each tile is recomputed and differentiated.

        `over` is the result of `over_gradients`, or a part of it: such gradients overwrite incoming ones if
        `in_place`. Otherwise the same steps write them to new memory, so that a probe shows the cost.
        """
        incoming = dict(zip(self.segment.outputs, gradients, strict=True))
        given = self._given(inputs, statistics)
        names = [self.segment.inputs[position] for position in wanted]
        taken = {
            name: self.segment.outputs[place] for name, place in zip(names, over, strict=False) if place >= 0
        }
        likes = self._likes(names, given)
        reused = {name: incoming[output] for name, output in taken.items()}
        places = reused if in_place else {n: in_memory(torch.empty_like(y)) for n, y in reused.items()}
        sums = Sums(given, likes, places)
        with differentiating():
            for tile in self._last.tiles:
                parts = tile.run(sums.leaves(tile))
                differentiate(parts, _incoming_parts(tile, incoming, taken, sums))
            self._hand_on(given, sums)
        return sums.totals(names)

    def over_inputs(self) -> list[int]:
        """For each output, the position of the input that it may be written over, or -1."""
        inputs = self.segment.inputs  # a total that was gathered is none of them
        taken = {output: inputs.index(name) for name, output in self._reused.items() if name in inputs}
        return [taken.get(output, -1) for output in self.segment.outputs]

    def over_gradients(self, wanted: Sequence[int]) -> list[int]:
        """For each input wanted, the position of the gradient that its own may be written over, or -1."""
        outputs = self.segment.outputs
        taken = (self._reused.get(self.segment.inputs[position]) for position in wanted)
        return [-1 if output is None else outputs.index(output) for output in taken]

    def loss(
        self, inputs: Sequence[Tensor], wanted: Sequence[int], statistics: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """The loss, then its gradients: each tile runs forward and backward at once, if any is wanted."""
        assert self._loss is not None, "the segment does not end in a loss"
        assert self.segment.loss is not None
        given = self._given(inputs, statistics)
        names = [self.segment.inputs[position] for position in wanted]
        sums = Sums(given, self._likes(names, given))
        operands = [use.tensor for use in self.segment.loss.inputs]
        total = torch.zeros((), dtype=torch.float64, device=inputs[0].device)
        weight = torch.zeros_like(total)
        cells = self._cells()
        with differentiating() if wanted else torch.no_grad():
            for tile in self._last.tiles:
                parts = tile.run(sums.leaves(tile))
                part, share = self._loss.of([parts[name] for name in operands])
                parts.clear()
                total += part.detach()
                weight += share
                differentiate({"loss": part}, [torch.full_like(part, 1 / cells)])
                del part, share  # before the next tile makes its own
            if wanted:
                self._hand_on(given, sums)
        scale = 1 / weight if self._loss.divides else torch.ones_like(weight)
        described = self.outputs[0]
        result = (total * scale).to(getattr(torch, str(described.dtype)))
        return [result, *sums.totals(names, float(scale * cells))]

    def _given(self, inputs: Sequence[Tensor], statistics: Sequence[Tensor]) -> dict[str, Tensor]:
        names = (*self.reads, *self.known)
        return dict(zip(names, (*inputs, *statistics), strict=True))

    def _likes(self, names: Sequence[str], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By name, a tensor that looks like the gradient: the input, or one on meta."""
        tensors, nowhere = self.segment.graph.tensors, torch.device("meta")
        wanted = (*names, *self.statistics)
        return {n: given[n] if n in given else empty_like_described(tensors[n], nowhere) for n in wanted}

    def _hand_on(self, given: Mapping[str, Tensor], sums: Sums) -> None:
        for of_round in reversed(self._rounds):
            of_round.hand_on(given, sums)

    def _cells(self) -> int:
        """A number near the weight of all tiles, so that unscaled gradients stay in range."""
        assert self._loss is not None
        assert self.segment.loss is not None
        first = self.segment.graph.tensors[self.segment.loss.inputs[0].tensor]
        return max(1, Rect.of_shape(shape_of(first)).volume) if self._loss.divides else 1


def _incoming_parts(
    tile: TileRun, incoming: Mapping[str, Tensor], taken: Mapping[str, str], sums: Sums
) -> list[Tensor]:
    """The gradients of what a tile writes: copies where sums take their place, which begin there."""
    copied = set(taken.values())
    parts = {name: incoming[name][index] for name, index in tile.writes.items()}
    gradients = [part.clone() if name in copied else part for name, part in parts.items()]
    for name in taken:
        if name in tile.reads:
            sums.clear(name, tile.reads[name])
    return gradients


def _local_round(of_round: Round, calls: Mapping[str, Call], known: Mapping[str, Gathering]) -> LocalRound:
    last = not of_round.statistics
    makers = (
        cache(partial(local_step, of_round.segment, calls, tile, known, ends_are_outputs=last))
        for tile in of_round.tiles
    )
    return LocalRound(tuple(makers), tuple(known[op.id] for op in of_round.statistics))


def _before(
    tile: TileLevels | None, remat: Segment, calls: Mapping[str, Call], known: Mapping[str, Gathering]
) -> TileRun | None:
    return None if tile is None else local_step(remat, calls, tile, known, ends_are_outputs=True)


def _known_in(segment: Segment, gatherings: Mapping[str, Gathering]) -> tuple[str, ...]:
    """The names of statistics that a segment has to be given."""
    return tuple(name for op in segment.ops if op.id in segment.known for name in gatherings[op.id].read)


def _name_of(segment: Segment, parts: tuple[int, ...]) -> str:
    """The segment's ends, the grid and a digest, so that two different sweeps never have one name.

    It is the same in every process: plans on disk know a sweep by it.
    """
    grid = "x".join(map(str, parts))
    return f"{segment.ops[0].id} to {segment.ops[-1].id} in {grid} tiles ({_digest(segment)})"


def _digest(segment: Segment) -> str:
    tensors = segment.graph.tensors
    text = [
        f"{op.type} {dict(op.attributes)} {[f'{name} {_look(tensors[name])}' for name in _names(op)]}"
        for op in segment.ops
    ]
    text.append(f"makes {segment.outputs}, knows {sorted(segment.known)}")
    return _digest_of(text)


def _likeness_of(parts: tuple[int, ...], reads: Sequence[str], *segments: Segment) -> str:
    """A digest of the grid and the ops, with tensors numbered, not named: equal blocks have the same one."""
    named = (name for segment in segments for op in segment.ops for name in _names(op))
    ends = (name for segment in segments for name in (*segment.inputs, *segment.outputs))
    numbers = {name: number for number, name in enumerate(dict.fromkeys((*reads, *named, *ends)))}
    text = [f"reads {len(reads)} in {parts}"]
    for segment in segments:
        tensors = segment.graph.tensors
        for op in segment.ops:
            used = [(numbers[name], tensors[name].kind, _look(tensors[name])) for name in _names(op)]
            how = op.id in segment.known, op is segment.loss
            text.append(f"{op.type} {dict(op.attributes)} {used} {how}")
        text += (str([numbers[name] for name in names]) for names in (segment.inputs, segment.outputs))
    return f"{sum(len(segment.ops) for segment in segments)} ops in tiles ({_digest_of(text)})"


def _names(op: Op) -> list[str]:
    return [use.tensor for use in (*op.inputs, *op.outputs)]


def _digest_of(text: Iterable[str]) -> str:
    return sha256("\n".join(text).encode()).hexdigest()[:12]


def _look(tensor: Described) -> str:
    """All that a sweep is built for: one for another dtype, layout or device computes something else."""
    return f"{tensor.dtype}{tensor.shape} by {tensor.layout or 'rows'} on {tensor.device}"
