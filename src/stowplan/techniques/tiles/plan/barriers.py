"""Barriers: what a worker says to others is said once, and never in tiles. Stages and segments lie between.

Right before sums are added up over workers, a stretch ends in its own part of a loss: a segment ends there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby

from stowplan.ir import Graph, Kind, Op, Phase
from stowplan.ops.effects import (
    BEGIN_GATHER,
    BEGIN_IN_ORDER,
    END_GATHER,
    GATHER_IN_ORDER,
    Effect,
    effect_of,
)
from stowplan.ops.table import shape_of, site_of

_PLACEHOLDER = "stowplan.bring.default"
_GATHERS = (BEGIN_GATHER, BEGIN_IN_ORDER, END_GATHER, GATHER_IN_ORDER)


def is_barrier(graph: Graph, op: Op) -> bool:
    """Whether others take part in an op, and it must stay between the ops that it stands between."""
    return bool(effect_of(site_of(graph, op)) & Effect.OUTSIDE) and not is_gather(op)


def is_gather(op: Op) -> bool:
    """Whether an op makes whole parameters of shards.

    It reads nothing that a segment makes, so it runs before the segment that it stands in. All messages keep
    their order.
    """
    return op.type in _GATHERS


def gathered_in(graph: Graph) -> frozenset[str]:
    """The whole parameters that ops gather from shards, without the token that some return as their last."""
    ends = (op.writes() for op in graph.ops if op.type == END_GATHER)
    in_order = (list(op.writes())[:-1] for op in graph.ops if op.type == GATHER_IN_ORDER)
    return frozenset(chain(*ends, *in_order))


def gathered_as_parameters(graph: Graph) -> Graph:
    """The same graph, in which whole parameters that are gathered of shards are parameters.

    A sweep reads them whole, and their gradients are sums over its tiles.
    """
    tensors = graph.tensors
    wholes = {n: replace(tensors[n], kind=Kind.PARAMETER, alias_of=None) for n in gathered_in(graph)}
    return replace(graph, tensors={**tensors, **wholes}) if wholes else graph


def runs_between_barriers(graph: Graph, forward: Sequence[Op]) -> Iterator[range]:
    """The places of forward ops in runs without a barrier, and between them the barriers.

    What only looks at a tensor, or makes something of parameters, right before or after a barrier is part of
    that: norms over workers look at images in ways that do not keep rectangles, and repeat their weights.
    """
    walls = _walls(graph, forward)
    for is_wall, places in groupby(range(len(forward)), key=walls.__contains__):
        together = list(places)
        run = range(together[0], together[-1] + 1)
        is_last = run.stop == len(forward)
        yield from (run,) if is_wall or is_last else _cut_behind_sum(graph, forward, run)


def _walls(graph: Graph, forward: Sequence[Op]) -> set[int]:
    barriers = {place for place, op in enumerate(forward) if is_barrier(graph, op)}
    walls = set(barriers)
    for step in (1, -1):
        for barrier in barriers:
            place = barrier + step
            while 0 <= place < len(forward) and place not in barriers and _prepares(graph, forward[place]):
                walls.add(place)
                place += step
    return walls


def _prepares(graph: Graph, op: Op) -> bool:
    tensors = graph.tensors
    only_looks = all(tensors[name].alias_of is not None for name in op.writes())
    return only_looks or {tensors[name].kind for name in op.reads()} <= {Kind.PARAMETER, Kind.BUFFER}


def _cut_behind_sum(graph: Graph, forward: Sequence[Op], run: range) -> Iterator[range]:
    """A run that other workers wait for ends in a few numbers: cut after the first op that makes one."""
    ends = (place + 1 for place in run if _sums_up(graph, forward[place]))
    middle = next(ends, run.stop)
    yield from (part for part in (range(run.start, middle), range(middle, run.stop)) if part)


def _sums_up(graph: Graph, op: Op) -> bool:
    tensors = graph.tensors
    makes_numbers = bool(op.outputs) and all(shape_of(tensors[name]) == () for name in op.writes())
    read = (tensors[name] for name in op.reads())
    return makes_numbers and any(shape_of(t) != () for t in read if t.kind is Kind.ACTIVATION)


def placeholders_early(graph: Graph) -> Graph:
    """The same graph, with each bucket's placeholder right after the collective before it."""
    forward = (op for op in graph.ops if op.phase is Phase.FORWARD)
    placeholders = {op.inputs[0].tensor: op for op in forward if op.type == _PLACEHOLDER and op.inputs}
    ops: list[Op] = []
    for op in graph.ops:
        if op.type != _PLACEHOLDER:
            _append(ops, op, placeholders)
    return replace(graph, ops=tuple(ops))


def _append(ops: list[Op], op: Op, placeholders: dict[str, Op]) -> None:
    ops.append(op)
    for name in op.writes():
        if name in placeholders:
            _append(ops, placeholders[name], placeholders)
