"""Sweep: a segment run tile by tile, forward and backward, with exact gradients.

The tiles partition the segment's output, so that the gradients of what they read, parameters and overlapping
parts of inputs alike, simply add up. They are added in float32 or wider, each as soon as autograd has it.
"""

from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor

from stowplan.capture import Call
from stowplan.geometry import Rect
from stowplan.ir import Tensor as Described
from stowplan.ops.table import shape_of
from stowplan.plan.tiles.fitness import fitting_tiles
from stowplan.plan.tiles.rects import Tile
from stowplan.plan.tiles.segment import Segment
from stowplan.run.tiles.forms import run_local
from stowplan.run.tiles.losses import TiledLoss, tiled_loss
from stowplan.run.tiles.part import Index, LocalCall, index_of, local_call


@dataclass(frozen=True, slots=True)
class LocalStep:
    """A tile made ready to run: where its inputs lie, its calls, and what it writes where.

    `frees[i]` are the names that no call after number i reads.
    """

    reads: Mapping[str, Index]
    calls: tuple[LocalCall, ...]
    frees: tuple[tuple[str, ...], ...]
    writes: Mapping[str, Index]  # outputs, or the operands of the loss: where in the whole they lie
    owned: Mapping[str, Index]  # where in what the tile holds of them, which may be more

    def run(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The parts that the tile writes, from the parts it reads; `values` is emptied on the way."""
        for call, gone in zip(self.calls, self.frees, strict=True):
            values[call.name] = run_local(call, values)
            for name in gone:
                del values[name]
        ends = {name: values[name][index] for name, index in self.owned.items()}
        values.clear()
        return ends


class Sweep:
    """A segment on a grid, with the calls that compute it. Inputs and outputs are in the segment's order."""

    def __init__(self, segment: Segment, calls: Mapping[str, Call], parts: Sequence[int]) -> None:
        self.segment, self.parts = segment, tuple(parts)
        tiles = fitting_tiles(segment, parts)
        self._tiles = tuple(_local_step(segment, calls, tile) for tile in tiles)
        self._loss: TiledLoss | None = None if segment.loss is None else tiled_loss(calls[segment.loss.id])
        self.name = _name_of(segment, self.parts)

    @property
    def outputs(self) -> tuple[Described, ...]:
        """What the outputs look like."""
        return tuple(self.segment.graph.tensors[name] for name in self.segment.outputs)

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs, written tile by tile."""
        given = dict(zip(self.segment.inputs, inputs, strict=True))
        made = {tensor.id: empty_like_described(tensor, inputs[0].device) for tensor in self.outputs}
        with torch.no_grad():
            for tile in self._tiles:
                parts = tile.run({name: given[name][index] for name, index in tile.reads.items()})
                for name, index in tile.writes.items():
                    made[name][index].copy_(parts[name])
        return list(made.values())

    def backward(
        self, gradients: Sequence[Tensor], inputs: Sequence[Tensor], wanted: Sequence[int]
    ) -> list[Tensor]:
        """The gradients of the inputs at positions `wanted`: each tile is run again and differentiated."""
        given = dict(zip(self.segment.outputs, gradients, strict=True))
        sums = _Sums(self.segment.inputs, inputs, wanted)
        with differentiating():
            for tile in self._tiles:
                parts = tile.run(sums.leaves(tile.reads))
                incoming = [given[name][index] for name, index in tile.writes.items()]
                _differentiate(parts, incoming)
        return sums.totals()

    def loss(self, inputs: Sequence[Tensor], wanted: Sequence[int]) -> list[Tensor]:
        """The loss, then its gradients: each tile runs forward and backward at once."""
        assert self._loss is not None, "the segment does not end in a loss"
        assert self.segment.loss is not None
        sums = _Sums(self.segment.inputs, inputs, wanted)
        operands = [use.tensor for use in self.segment.loss.inputs]
        total = torch.zeros((), dtype=torch.float64, device=inputs[0].device)
        weight = torch.zeros_like(total)
        cells = self._cells()
        with differentiating():
            for tile in self._tiles:
                parts = tile.run(sums.leaves(tile.reads))
                part, share = self._loss.of([parts[name] for name in operands])
                parts.clear()
                total += part.detach()
                weight += share
                _differentiate({"loss": part}, [torch.full_like(part, 1 / cells)])
        scale = 1 / weight if self._loss.divides else torch.ones_like(weight)
        described = self.outputs[0]
        result = (total * scale).to(getattr(torch, str(described.dtype)))
        return [result, *sums.totals(float(scale * cells))]

    def _cells(self) -> int:
        """A number near the weight of all tiles, so that unscaled gradients stay in range."""
        assert self._loss is not None
        assert self.segment.loss is not None
        first = self.segment.graph.tensors[self.segment.loss.inputs[0].tensor]
        return max(1, Rect.of_shape(shape_of(first)).volume) if self._loss.divides else 1


class _Sums:
    """The inputs of a segment as leaves of one tile after another, and the sums of their gradients."""

    def __init__(self, names: Sequence[str], inputs: Sequence[Tensor], wanted: Sequence[int]) -> None:
        self._inputs = dict(zip(names, inputs, strict=True))
        self._sums = {names[position]: _zeros_like(inputs[position]) for position in wanted}

    def leaves(self, reads: Mapping[str, Index]) -> dict[str, Tensor]:
        """The parts that a tile reads. What arrives as gradient of one is added to its sum and let go of."""
        return {name: self._leaf(name, index) for name, index in reads.items()}

    def _leaf(self, name: str, index: Index) -> Tensor:
        leaf = self._inputs[name].detach()[index]
        if name not in self._sums:
            return leaf
        leaf = leaf.detach().requires_grad_()
        part = self._sums[name][index]

        def add(arrived: Tensor) -> None:
            part.add_(arrived.grad)  # type: ignore[arg-type]  # there is one when the hook is called
            arrived.grad = None

        leaf.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
        return leaf

    def totals(self, scale: float = 1.0) -> list[Tensor]:
        """The sums, in the dtype of their inputs."""
        for total in self._sums.values():
            if scale != 1.0:
                total.mul_(scale)
        return [total.to(self._inputs[name].dtype) for name, total in self._sums.items()]


def _differentiate(ends: dict[str, Tensor], incoming: Sequence[Tensor]) -> None:
    """Run autograd from the ends, which it alone holds from then on."""
    pairs = [(end, grad) for end, grad in zip(ends.values(), incoming, strict=True) if end.requires_grad]
    ends.clear()
    if pairs:
        torch.autograd.backward([end for end, _ in pairs], [grad for _, grad in pairs])


_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality


@contextmanager
def differentiating() -> Iterator[None]:
    """Autograd on, also inside the kernel of a custom op, where PyTorch has switched it off."""
    was_off = torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_AUTOGRAD, False)
    try:
        with torch.enable_grad():
            yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_AUTOGRAD, was_off)


def _local_step(segment: Segment, calls: Mapping[str, Call], tile: Tile) -> LocalStep:
    graph = segment.graph
    made = [local_call(graph, calls[level.op.id], level, tile.held) for level in tile.levels]
    reads = {name: index_of(tile.held[name]) for name in segment.inputs if name in tile.held}
    return LocalStep(
        reads=reads,
        calls=tuple(made),
        frees=_frees(made, tile.owned),
        writes={name: index_of(rect) for name, rect in tile.owned.items()},
        owned={name: _inside(rect, tile.held[name]) for name, rect in tile.owned.items()},
    )


def _inside(part: Rect, held: Rect) -> Index:
    return index_of(part.shift([-low for low in held.lo]))


def _frees(calls: Sequence[LocalCall], kept: Mapping[str, Rect]) -> tuple[tuple[str, ...], ...]:
    last: dict[str, int] = {}
    for number, call in enumerate(calls):
        for source in call.sources:
            if source is not None:
                last[source.tensor] = number
    gone: list[list[str]] = [[] for _ in calls]
    for name, number in last.items():
        if name not in kept:
            gone[number].append(name)
    return tuple(map(tuple, gone))


def _zeros_like(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


def empty_like_described(tensor: Described, device: torch.device) -> Tensor:
    """Room for a tensor, laid out as it was when captured if that leaves no gaps."""
    shape, dtype = shape_of(tensor), getattr(torch, str(tensor.dtype))
    if tensor.layout:
        stride: tuple[int, ...] = literal_eval(tensor.layout)
        order = sorted(range(len(shape)), key=lambda dim: -stride[dim])
        dense = torch.empty([shape[dim] for dim in order], dtype=dtype, device=device)
        laid_out = dense.permute([order.index(dim) for dim in range(len(shape))])
        if laid_out.stride() == stride:
            return laid_out
    return torch.empty(shape, dtype=dtype, device=device)


def _name_of(segment: Segment, parts: tuple[int, ...]) -> str:
    """What is computed and how, and a digest, so that no two sweeps that differ have one name."""
    tensors = segment.graph.tensors
    text = [
        f"{op.type} {dict(op.attributes)} {[(use.tensor, tensors[use.tensor].shape) for use in op.inputs]}"
        for op in segment.ops
    ]
    digest = sha256("\n".join(text).encode()).hexdigest()[:6]
    grid = "x".join(map(str, parts))
    return f"{segment.ops[0].id} to {segment.ops[-1].id} in {grid} tiles ({digest})"
