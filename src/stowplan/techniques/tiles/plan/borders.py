"""Segments that begin with a norm: the norm's input is kept whole, everything after it is in tiles.

If a norm's input is the segment's input, its statistics cost one more reading of that input. Inside a segment
they cost a second computation of all ops before the norm. A network with norms is therefore cut right before
each norm. The norm's output and the activation after it are then never whole: half of what eager keeps.

A block with narrow ends that is wide inside, such as a bottleneck, is also cut before its narrow norms alone:
the inputs of its wide norms are computed a second time, and are never whole either.

Crops right after the tensor that they crop: a segment then outputs only the needed part of a skip.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import dropwhile, takewhile

from stowplan.ir import Graph, Kind, Op, Phase
from stowplan.ops.regions import Partial
from stowplan.ops.statistics import statistic_of
from stowplan.ops.table import site_of
from stowplan.ops.tiling import RESHAPES
from stowplan.techniques.tiles.plan.barriers import (
    gathered_as_parameters,
    placeholders_early,
    runs_between_barriers,
)
from stowplan.techniques.tiles.plan.products import is_product

_CROPS = frozenset({"aten.slice.Tensor", "aten.select.int", "GetItem"})


def crops_early(graph: Graph) -> Graph:
    """The same graph with every forward crop run as soon as it can be."""
    crops = [op for op in graph.ops if op.phase is Phase.FORWARD and op.type in _CROPS and op.inputs]
    followers: dict[str, list[Op]] = {}
    for op in crops:
        followers.setdefault(op.inputs[0].tensor, []).append(op)
    made = {name for op in graph.ops for name in op.writes()}
    moved = {op.id for op in crops if op.inputs[0].tensor in made}
    ops: list[Op] = []
    for op in graph.ops:
        if op.id not in moved:
            _append(ops, op, followers)
    return replace(graph, ops=tuple(ops))


def _append(ops: list[Op], op: Op, followers: dict[str, list[Op]]) -> None:
    """An op, the crops of its outputs, and the crops of those, each right after its input."""
    waiting = [op]
    while waiting:
        ops.append(waiting.pop())
        crops = [crop for name in ops[-1].writes() for crop in followers.get(name, ())]
        waiting += reversed(crops)


_WIDE = 2  # times the bytes at the borders before and after: a border this wide is better not whole


def in_tiling_order(graph: Graph) -> Graph:
    """The same graph with crops and placeholders as early, and norms as late, as they can be.

    Parameters that are gathered of shards are parameters in it.
    """
    return norms_late(crops_early(placeholders_early(gathered_as_parameters(graph))))


def norms_late(graph: Graph) -> Graph:
    """The same graph with every norm over places run right before what reads it, branches side by side."""
    ops, waiting = list[Op](), list[Op]()
    for op in graph.ops:
        if _is_norm(graph, op) or (op.phase is Phase.UPDATE and _reads_any(op, waiting)):
            waiting.append(op)
            continue
        if op.phase is Phase.BACKWARD or _reads_any(op, waiting):
            ops += waiting
            waiting.clear()
        ops.append(op)
    return replace(graph, ops=(*ops, *waiting))


def stretches_between_norms(graph: Graph) -> list[tuple[str, ...]]:
    """The forward ops, cut at barriers and before every norm and what only prepares its input or weights."""
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    starts = {_start(graph, forward, place) for place in _norms(graph, forward)}
    if not starts - {0}:
        return [tuple(op.id for op in forward)]
    borders = sorted(starts.union(run.start for run in runs_between_barriers(graph, forward)) - {0})
    edges = zip((0, *borders), (*borders, len(forward)), strict=True)
    return [tuple(op.id for op in forward[low:high]) for low, high in edges]


def stretches_between_narrow_norms(graph: Graph) -> list[tuple[str, ...]]:
    """The same, but that stretches are one where the norms between them are wide."""
    first, *others = stretches_between_norms(graph)
    handed = [0, *(_bytes_at_start(graph, stretch) for stretch in others), 0]
    merged = [first]
    for place, stretch in enumerate(others, start=1):
        is_wide = 0 < handed[place] >= _WIDE * max(handed[place - 1], handed[place + 1])
        if is_wide and _are_behind_products(graph, stretch):
            merged[-1] += stretch
        else:
            merged.append(stretch)
    return merged


def _bytes_at_start(graph: Graph, stretch: Sequence[str]) -> int:
    """Bytes of what the norms that a stretch begins with are taken of."""
    return sum(graph.tensors[op.inputs[0].tensor].nbytes or 0 for op in _norms_at_start(graph, stretch))


def _are_behind_products(graph: Graph, stretch: Sequence[str]) -> bool:
    """Whether their statistics can be known without what they are taken of."""
    read = {op.inputs[0].tensor for op in _norms_at_start(graph, stretch)}
    makers = [op for op in graph.ops if not read.isdisjoint(op.writes())]
    return all(is_product(graph, op) for op in makers)


def _norms_at_start(graph: Graph, stretch: Sequence[str]) -> Iterator[Op]:
    ops = {op.id: op for op in graph.ops}
    behind = dropwhile(lambda op: not _is_norm(graph, op), (ops[name] for name in stretch))
    return takewhile(lambda op: _is_norm(graph, op), behind)


def _norms(graph: Graph, forward: list[Op]) -> Iterator[int]:
    """The first of norms that follow each other."""
    for place, op in enumerate(forward):
        if _is_norm(graph, op) and not (place and _is_norm(graph, forward[place - 1])):
            yield place


def _start(graph: Graph, forward: list[Op], norm: int) -> int:
    place = norm
    while place and _prepares(graph, forward[place - 1]):
        place -= 1
    return place


def _prepares(graph: Graph, op: Op) -> bool:
    kinds = {graph.tensors[name].kind for name in op.reads()}
    return op.type in RESHAPES or kinds <= {Kind.PARAMETER, Kind.BUFFER}


def _is_norm(graph: Graph, op: Op) -> bool:
    if op.phase is not Phase.FORWARD:
        return False
    statistic = statistic_of(site_of(graph, op))
    return statistic is not None and statistic.partial is Partial.MOMENTS


def _reads_any(op: Op, waiting: list[Op]) -> bool:
    made = {name for norm in waiting for name in norm.writes()}
    return not made.isdisjoint(op.reads())
