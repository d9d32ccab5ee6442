"""Recomputed skips: a skip that is cheap to compute is recomputed for its late reader instead of kept.

A tile computes the reader's part of the skip from the network's input. The skip is then never whole, and
neither is its gradient, which would otherwise wait for the stage that made the skip: the gradients through
the two computations add up.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stowplan.ir import Graph, Kind, Op, Phase
from stowplan.ops.effects import Effect, effect_of, macs_of
from stowplan.ops.statistics import statistic_of
from stowplan.ops.table import site_of
from stowplan.techniques.tiles.plan.barriers import is_gather
from stowplan.techniques.tiles.plan.candidates import stages_of

_CHEAP = 0.3  # of the forward half's multiply-accumulates: the most that recomputing skips may take
_MOST = 2  # skips: each is one more step to capture and look for tiles in
_LATE = 2  # stages from the maker to a late reader, at least


@dataclass(frozen=True, slots=True)
class Skip:
    """A tensor, the op that reads it late, and all ops that make it of the network's inputs."""

    tensor: str
    reader: str
    makers: tuple[Op, ...]


def cheap_skips(graph: Graph) -> tuple[Skip, ...]:
    """The largest skips that together are cheap to recompute, the largest first."""
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    macs = {op.id: macs_of(site_of(graph, op)) for op in forward}
    room, chosen = _CHEAP * sum(macs.values()), list[Skip]()
    for skip in sorted(_late_skips(graph, forward), key=lambda s: -(graph.tensors[s.tensor].nbytes or 0)):
        cost = sum(macs[op.id] for op in skip.makers)
        if 0 < cost <= room:
            chosen.append(skip)
            room -= cost
    return tuple(chosen[:_MOST])


def _late_skips(graph: Graph, forward: Sequence[Op]) -> Iterator[Skip]:
    stage = {op: number for number, ops in enumerate(stages_of(graph)) for op in ops}
    maker = {name: op for op in forward if not is_gather(op) for name in op.writes()}
    for reader in forward:
        for name in dict.fromkeys(reader.reads()):
            if name in maker and stage[reader.id] - stage[maker[name].id] >= _LATE:
                makers = _makers(forward, maker, name)
                if graph.tensors[name].kind is Kind.ACTIVATION and _can_be_recomputed(graph, makers):
                    yield Skip(name, reader.id, makers)


def _makers(forward: Sequence[Op], maker: Mapping[str, Op], name: str) -> tuple[Op, ...]:
    """All ops that make a tensor of inputs and parameters."""
    found, open_names = set[str](), [name]
    while open_names:
        op = maker.get(open_names.pop())
        if op is not None and op.id not in found:
            found.add(op.id)
            open_names += op.reads()
    return tuple(op for op in forward if op.id in found)


def _can_be_recomputed(graph: Graph, makers: Sequence[Op]) -> bool:
    """Whether a second run draws no random numbers, updates no buffers and gathers no statistics."""
    sites = [site_of(graph, op) for op in makers]
    return all(effect_of(site) is Effect.NONE and statistic_of(site) is None for site in sites)
