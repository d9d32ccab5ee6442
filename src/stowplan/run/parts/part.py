"""LocalCall: one op of one tile as a call on the parts of its inputs that it needs."""

from ast import literal_eval
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stowplan import ir
from stowplan.capture import Call, Ref
from stowplan.geometry import Rect
from stowplan.ir import Graph, Shape
from stowplan.ops.table import shape_of
from stowplan.plan.level import Level
from stowplan.torch_private import OpOverload, schema_of

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class PartSlot:
    """Stands for input number `position` of an op in the arguments of its call."""

    position: int


@dataclass(frozen=True, slots=True)
class PartSource:
    """Where an input comes from: what the tile holds of `tensor`, or with an index a part of that."""

    tensor: str
    index: Index | None
    start: tuple[int, ...]  # where the part begins in the whole tensor
    overhang: tuple[tuple[int, int], ...]  # padding before and after, by dim
    whole: Shape = ()  # the shape of the whole tensor

    def of(self, values: Mapping[str, Tensor]) -> Tensor:
        """The part that is needed."""
        held = values[self.tensor]
        return held if self.index is None else held[self.index]


@dataclass(frozen=True, slots=True)
class LocalCall:
    """A call of `target` that makes the part `shape` of output number `output`, called `name`.

    `arguments` are by the schema's names, with a Slot for each tensor; `sources` are by position, None for an
    input that this part needs nothing of. `statistics` are mean and variance of an op that normalises. The
    value of an `idle` call is not needed when the tile is differentiated. Where it is only run, what it makes
    may be normalised by `norm` on the way, or written `over` one of its inputs. `by` computes the op in its
    stead, from arguments by name.
    """

    target: OpOverload
    arguments: Mapping[str, object]
    sources: tuple[PartSource | None, ...]
    name: str
    output: int
    made: Rect
    statistics: tuple[PartSource, ...] = ()
    idle: bool = False
    norm: "LocalCall | None" = None
    over: int | None = None
    by: Callable[[Mapping[str, object]], Tensor] | None = None

    @property
    def shape(self) -> Shape:
        return self.made.shape

    def given(self, values: Mapping[str, Tensor]) -> dict[str, object]:
        """The arguments with tensors in their slots; items of lists that are not needed are left out."""
        parts = [None if source is None else source.of(values) for source in self.sources]
        return {name: filled_in(value, parts) for name, value in self.arguments.items()}

    def overhang(self, position: int) -> tuple[tuple[int, int], ...]:
        """The padding that the part needs around input number `position`."""
        source = self.sources[position]
        return source.overhang if source else ()


def local_call(graph: Graph, call: Call, level: Level, held: Mapping[str, Rect]) -> LocalCall:
    """The call for one level of a tile that holds these parts."""
    slots = iter(range(len(level.op.inputs)))
    bound = call.arguments()
    arguments = {name: slotted(value, slots) for name, value in bound.items()}
    sources = []
    for use, need in zip(level.op.inputs, level.needs, strict=True):
        shape = shape_of(graph.tensors[use.tensor])
        sources.append(None if need is None else _source(use.tensor, need, shape, held[use.tensor]))
    name = level.op.outputs[level.output].tensor
    return LocalCall(call.target, arguments, tuple(sources), name, call.outputs.index(name), level.made)


def _source(tensor: str, need: Rect, shape: Shape, held: Rect) -> PartSource:
    inside = need.clip(shape)
    index = None if inside == held else index_of(inside.shift([-low for low in held.lo]))
    return PartSource(tensor, index, inside.lo, need.overhang(shape), shape)


def index_of(rect: Rect) -> Index:
    """A rect as an index into a tensor."""
    return tuple(slice(low, high) for low, high in zip(rect.lo, rect.hi, strict=True))


def index_within(part: Rect, whole: Rect) -> Index:
    """A part as an index into a tensor that holds `whole`."""
    return index_of(part.shift([-low for low in whole.lo]))


def call_with(target: OpOverload, given: Mapping[str, object]) -> object:
    """Call `target` with all its arguments, which are by name."""
    arguments = schema_of(target).arguments
    args = [given[argument.name] for argument in arguments if not argument.kwarg_only]
    return target(*args, **{a.name: given[a.name] for a in arguments if a.kwarg_only})


def slotted(value: object, slots: Iterator[int]) -> object:
    """An argument with the next slot in place of each tensor."""
    if isinstance(value, Ref):
        return PartSlot(next(slots))
    if isinstance(value, (tuple, list)):
        return tuple(slotted(item, slots) for item in value)
    return value


def filled_in(value: object, parts: Sequence[Tensor | None]) -> object:
    """An argument with tensors in its slots."""
    match value:
        case PartSlot(position):
            return parts[position]
        case tuple() if any(isinstance(item, PartSlot) for item in value):
            filled = (filled_in(item, parts) for item in value)
            return [item for item in filled if isinstance(item, Tensor)]
        case _:
            return value


def empty_like_described(tensor: ir.Tensor, device: torch.device) -> Tensor:
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
