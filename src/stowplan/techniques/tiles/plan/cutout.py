"""A segment cut out of its graph, as text: a plan with it shows the ops inside its tiles."""

from dataclasses import replace

from stowplan.analyse.facts import is_resident
from stowplan.ir import Graph, Kind, Tensor
from stowplan.ir.text import format_graph, parse_graph
from stowplan.techniques.tiles.plan.segment import Segment, segment_of


def segment_text(segment: Segment) -> str:
    """The ops of a segment as a separate graph, which holds the segment's outputs."""
    made = {name for op in segment.ops for name in op.writes()}
    tensors = segment.graph.tensors
    used = made | {use.tensor for op in segment.ops for use in op.inputs}
    used |= {segment.graph.storage_of(name) for name in used}
    kept = {name: t if name in made else _given(t) for name, t in tensors.items() if name in used}
    ops = tuple(replace(op, adjoint_of=None) for op in segment.ops)
    return format_graph(Graph(kept, ops, frozenset(segment.outputs)))


def segment_in(text: str) -> Segment:
    """The segment that such a text tells of."""
    graph = parse_graph(text)
    return segment_of(graph, [op.id for op in graph.ops])


def _given(tensor: Tensor) -> Tensor:
    """A tensor as seen from a graph that does not make it."""
    kind = tensor.kind if is_resident(tensor) else Kind.INPUT
    return replace(tensor, kind=kind, alias_of=None, gradient_of=None)
