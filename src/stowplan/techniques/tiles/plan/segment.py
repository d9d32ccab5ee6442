"""Segment: a stretch of the forward half that is computed tile by tile: nothing inside is ever whole."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from stowplan.errors import BadUse, NotTileable
from stowplan.ir import Graph, Kind, Op, Phase
from stowplan.ops.regions import Reduction, Relation, regions_of
from stowplan.ops.statistics import Statistic, statistic_of
from stowplan.ops.table import registered_types, shape_of, site_of
from stowplan.ops.tiling import Refusal, refusal_of
from stowplan.techniques.tiles.plan.barriers import is_barrier, is_gather

WHOLE_STEP = "the whole step"


@dataclass(frozen=True, slots=True)
class OpRules:
    """The rules of a segment's ops by id: looked up once for all its grids and the passes over them."""

    regions: dict[str, tuple[Relation, ...]] = field(default_factory=dict)
    statistics: dict[str, Statistic | None] = field(default_factory=dict)
    refusals: dict[str, Refusal] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive forward ops. `inputs` come from outside, parameters among them; `outputs` go outside.

    `apart` are ops of the stretch that are made of nothing, dropout masks and positions, and ops that gather
    parameters: they run whole and in their order before the tiles, so that the same numbers are drawn. `loss`
    reduces what the other ops make to the segment's only output: then a tile runs forward and backward at
    once. `known` are ops of it whose statistics are given beside the inputs, so that they can make a part of
    their output.
    """

    graph: Graph
    ops: tuple[Op, ...]
    apart: tuple[Op, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    loss: Op | None = None
    known: frozenset[str] = frozenset()
    rules: OpRules = field(default_factory=OpRules, compare=False, repr=False)

    def relations(self, op: Op) -> tuple[Relation, ...]:
        """The relation of each output of an op to its inputs, with known statistics."""
        found = self.statistic(op) if op.id in self.known else None
        if op.id not in self.rules.regions:
            self.rules.regions[op.id] = regions_of(site_of(self.graph, op)).outputs
        outputs = self.rules.regions[op.id]
        return outputs if found is None or found.after is None else (found.after, *outputs[1:])

    def statistic(self, op: Op) -> Statistic | None:
        """The statistic that an op takes."""
        if op.id not in self.rules.statistics:
            self.rules.statistics[op.id] = statistic_of(site_of(self.graph, op))
        return self.rules.statistics[op.id]

    def refusal(self, op: Op) -> Refusal:
        """Why an op cannot compute a part of its output, by part."""
        if op.id not in self.rules.refusals:
            self.rules.refusals[op.id] = refusal_of(site_of(self.graph, op))
        return self.rules.refusals[op.id]

    @property
    def inside(self) -> tuple[str, ...]:
        """The tensors that its ops make and no other op reads."""
        seen = {*self.outputs, *self.updates}
        return tuple(name for op in self.ops for name in op.writes() if name not in seen)

    @property
    def updates(self) -> tuple[str, ...]:
        """New running statistics of norms inside: made beside the tiles, once, of what they gathered."""
        read = {name for op in self.graph.ops if op.phase is Phase.UPDATE for name in op.reads()}
        made = (name for op in self.ops for name in op.writes())
        return tuple(name for name in made if name in read and name not in self.outputs)


def segment_of(graph: Graph, ops: Iterable[str]) -> Segment:
    """The segment of these ops, which must follow each other in the forward half."""
    chosen = set(ops)
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    places = [place for place, op in enumerate(forward) if op.id in chosen]
    if len(places) != len(chosen) or not places or places[-1] - places[0] + 1 != len(places):
        raise BadUse("a segment must be consecutive ops of the forward half")
    stretch = forward[places[0] : places[-1] + 1]
    if collective := next((op.id for op in stretch if is_barrier(graph, op)), None):
        raise NotTileable(f"other workers take part in {collective}, once")
    if idle := next((op.id for op in stretch if not op.outputs), None):
        raise NotTileable(f"{idle} makes nothing that could be cut")
    apart = _made_of_nothing(graph, stretch)
    tiled = tuple(op for op in stretch if op not in apart)
    made = {name for op in tiled for name in op.writes()}
    read = {name for op in tiled for name in _values_read(graph, op)}
    outputs = _seen_outside(graph, tiled)
    seen = read.union(outputs)  # a norm with fixed statistics makes empty ones, which backward alone reads
    if empty := next((t for n, t in graph.tensors.items() if n in seen and 0 in shape_of(t)), None):
        raise NotTileable(f"{empty.id} of shape {shape_of(empty)} has no elements to cut")
    if outputs and _are_dead(graph, tiled, outputs):
        raise NotTileable(f"nobody reads {outputs[0]}, which a sweep would make: it would not be run")
    return Segment(
        graph,
        tiled,
        apart,
        inputs=tuple(name for name in graph.tensors if name in read - made),
        outputs=outputs,
        loss=tiled[-1] if tiled and _is_loss(graph, tiled[-1], outputs) else None,
    )


def reduction_of(graph: Graph, loss: Op) -> Reduction | None:
    """How a loss merges its tiles; None for an op that is not one."""
    return regions_of(site_of(graph, loss)).outputs[0].reduction


def _is_loss(graph: Graph, op: Op, outputs: tuple[str, ...]) -> bool:
    first = op.outputs[0].tensor
    reduces = shape_of(graph.tensors[first]) == () and reduction_of(graph, op) is not None
    return outputs == (first,) and reduces


def _made_of_nothing(graph: Graph, stretch: list[Op]) -> tuple[Op, ...]:
    """The ops that read no value but of each other, gather parameters, or only count on in a buffer."""
    made: set[str] = set()
    apart = []
    for op in stretch:
        if is_gather(op) or made.issuperset(_values_read(graph, op)) or _counts(graph, op):
            made.update(op.writes())
            apart.append(op)
    return tuple(apart)


def _counts(graph: Graph, op: Op) -> bool:
    return all(
        graph.tensors[name].kind is Kind.BUFFER and shape_of(graph.tensors[name]) == () for name in op.reads()
    )


def _values_read(graph: Graph, op: Op) -> set[str]:
    """The inputs whose contents matter; a rule may say that one only tells a shape.

    What a norm makes of its running statistics is made outside of its segment, once.
    """
    site = site_of(graph, op)
    relations = regions_of(site).outputs
    if statistic_of(site) is not None:
        relations = relations[:1]
    return {
        use.tensor
        for position, use in enumerate(op.inputs)
        if any(relation.needs[position] is not None for relation in relations)
    }


@dataclass(frozen=True, slots=True, eq=False)
class _Identical:
    """A graph that equals itself alone: comparing two by their contents would take long."""

    graph: Graph

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identical) and self.graph is other.graph

    def __hash__(self) -> int:
        return id(self.graph)


@lru_cache(maxsize=4)
def _all_values_read(of: _Identical, _registered: int) -> Mapping[str, set[str]]:
    """By op that is not in backward; remembered, for all segments of a graph ask. `_registered` is the number
    of rules that users gave: each may change what is read."""
    return {op.id: _values_read(of.graph, op) for op in of.graph.ops if op.phase is not Phase.BACKWARD}


def _seen_outside(graph: Graph, tiled: tuple[Op, ...]) -> tuple[str, ...]:
    """The outputs: tensors that others read or hold, and tensors that nothing in the forward half reads."""
    inside = {op.id for op in tiled}
    read_by = _all_values_read(_Identical(graph), len(registered_types))
    outside = graph.held.union(*(names for op, names in read_by.items() if op not in inside))
    anywhere = outside.union(*read_by.values())
    ends = {op.outputs[0].tensor for op in tiled} - anywhere
    return tuple(name for op in tiled for name in _made(graph, op) if name in outside or name in ends)


def _are_dead(graph: Graph, tiled: tuple[Op, ...], outputs: Iterable[str]) -> bool:
    """Whether all outputs are of norms that were called for their running statistics alone.

    Nobody holds or reads them. A loss may be like that too in a graph that does not tell what is held.
    """
    seen = graph.held.union(*(op.reads() for op in graph.ops))
    updated = {name for op in graph.ops if op.phase is Phase.UPDATE for name in op.reads()}
    norms = {name for op in tiled if not updated.isdisjoint(op.writes()) for name in op.writes()}
    return (norms - seen).issuperset(outputs)


def _made(graph: Graph, op: Op) -> Iterable[str]:
    """The outputs of an op, without the statistics of a norm."""
    return op.writes() if statistic_of(site_of(graph, op)) is None else (op.outputs[0].tensor,)


def stretch_named(ops: Sequence[Op]) -> str:
    """A name for some consecutive ops that a user knows: the modules of the first and last op, or the ops."""
    if not ops:
        return "nothing"
    first, last = ((op.scope or op.id) for op in (ops[0], ops[-1]))
    return first if first == last else f"{first} to {last}"


def stretch_of(graph: Graph, ops: Iterable[str]) -> str:
    """The same for ops by id."""
    chosen = set(ops)
    return stretch_named([op for op in graph.ops if op.id in chosen])
