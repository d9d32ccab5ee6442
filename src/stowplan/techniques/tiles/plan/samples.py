"""A step on a few of its samples: the same ops on smaller tensors, a graph that any planner can go on with.

Run once for every group of samples, it makes the gradients of parameters as sums over the groups. A sum is
there all the time; what one group adds to it is gone as soon as it is added.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stowplan.geometry import Rect
from stowplan.ir import Graph, Kind, Op, Phase, Tensor
from stowplan.ops.table import shape_of
from stowplan.plan.pricing import Pricing
from stowplan.techniques.tiles.plan.rects import TileLevels
from stowplan.techniques.tiles.plan.segment import Segment

_OUTSIDE = (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT)


@dataclass(frozen=True, slots=True)
class SampleStep:
    """The step of one group, its prices, and the bytes that come from outside: parameters and the samples."""

    graph: Graph
    pricing: Pricing
    outside_bytes: int


def sample_step(segment: Segment, tile: TileLevels, pricing: Pricing) -> SampleStep:
    """The step whose forward half is `segment`, on what `tile` holds."""
    graph = segment.graph
    held = {**tile.held, **_beside(graph, tile.held)}
    tensors = {name: _part(tensor, held) for name, tensor in graph.tensors.items()}
    sums = {name for name in graph.held if graph.tensors[name].gradient_of in segment.inputs}
    outside = sum(t.nbytes or 0 for t in tensors.values() if t.kind in _OUTSIDE and t.alias_of is None)
    smaller = replace(graph, tensors=tensors, held=graph.held - sums)
    return SampleStep(smaller, _priced(graph, pricing, held), outside)


def _beside(graph: Graph, held: Mapping[str, Rect]) -> dict[str, Rect]:
    """Rects of outputs that no tile pulls, such as a mask: as the pulled output, if shapes are equal."""
    found: dict[str, Rect] = {}
    for op in graph.ops:
        pulled = next((name for name in op.writes() if name in held), None)
        if op.phase is Phase.FORWARD and pulled is not None:
            alike = (n for n in op.writes() if graph.tensors[n].shape == graph.tensors[pulled].shape)
            found |= dict.fromkeys(alike, held[pulled])
    return found


def _part(tensor: Tensor, held: Mapping[str, Rect]) -> Tensor:
    rect = held.get(tensor.gradient_of or tensor.id)
    if rect is None or tensor.kind is Kind.PARAMETER or tensor.nbytes is None:
        return tensor
    whole = Rect.of_shape(shape_of(tensor)).volume
    nbytes = -(-tensor.nbytes * rect.volume // max(1, whole))
    return replace(tensor, shape=rect.shape, nbytes=nbytes, layout="") if rect.volume != whole else tensor


def _priced(graph: Graph, pricing: Pricing, held: Mapping[str, Rect]) -> Pricing:
    """Each op by its share of what it makes, or of what the op it differentiates makes."""
    share = {op.id: _share(graph, op, held) for op in graph.ops}
    of_op = {op.id: share.get(op.adjoint_of or op.id, 1.0) for op in graph.ops}
    return Pricing(
        {op.id: pricing.seconds[op.id] * of_op[op.id] for op in graph.ops},
        pricing.basis,
        {name: round(nbytes * of_op.get(name, 1.0)) for name, nbytes in pricing.workspace_bytes.items()},
    )


def _share(graph: Graph, op: Op, held: Mapping[str, Rect]) -> float:
    for name in (*op.writes(), *op.reads()):
        if name in held and graph.tensors[name].kind is not Kind.PARAMETER:
            return held[name].volume / max(1, Rect.of_shape(shape_of(graph.tensors[name])).volume)
    return 1.0
