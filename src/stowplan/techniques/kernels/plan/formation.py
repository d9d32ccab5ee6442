"""Formation of groups: ops that read each other's results are joined as long as one kernel can have them all.

Two ops are joined if both are fusible, are in the same half, run over the same domain (or one of them over a
small part of it, as between the two passes of a norm), and if no path leaves the group and returns. What
forward made and a backward group reads is then computed in that group, where that leaves less to keep
(`_own_copies`).
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from stowplan.ir import Graph, Phase
from stowplan.plan.problem import outdated_tensors, updated_buffers
from stowplan.techniques.kernels.plan.dependencies import Relatives, bits_of
from stowplan.techniques.kernels.plan.fusible import POINTWISE, SINGLES, domain_of, is_fusible

_MOST_OPS = 48
_SMALL = 32  # an op over this part of a group's domain, or less, joins it


@dataclass(frozen=True, slots=True)
class Group:
    """The ops that one kernel computes, by id in the order of the graph.

    `copies` are the ops among them that it repeats for itself alone: views, and pointwise ops of the forward
    half. The others run nowhere else.
    """

    ops: tuple[str, ...]
    copies: tuple[str, ...] = ()

    @property
    def own(self) -> tuple[str, ...]:
        """The ops that run nowhere else."""
        return tuple(op for op in self.ops if op not in self.copies)


def groups_of(graph: Graph, barred: Collection[str] = ()) -> tuple[Group, ...]:
    """The groups of two ops or more, and single ops of `SINGLES`; none has an op that is `barred`."""
    known = Relatives(graph)
    updated = updated_buffers(graph)
    fusible = [op.id not in barred and is_fusible(graph, op, updated) for op in graph.ops]
    members = _joined(graph, known, fusible)
    groups = [_with_views(graph, known, found) for found in members]
    return tuple(_own_copies(graph, known, groups, fusible))


def _joined(graph: Graph, known: Relatives, fusible: Sequence[bool]) -> list[int]:
    """Groups as sets of positions."""
    group_of = {position: 1 << position for position, may in enumerate(fusible) if may}
    domain_of_op = {position: domain_of(graph, graph.ops[position]) for position in group_of}
    domains = dict(domain_of_op)
    for position in group_of:
        for name in graph.ops[position].reads():
            maker = known.maker_behind(name)
            if maker is None or maker not in group_of or group_of[maker] == group_of[position]:
                continue
            one, other = group_of[maker], group_of[position]
            if graph.ops[maker].phase is not graph.ops[position].phase:
                continue
            sizes = sorted((domains[maker], domains[position]))
            if sizes[0] != sizes[1] and sizes[0] * _SMALL > sizes[1]:
                continue
            whole = one | other
            if whole.bit_count() > _MOST_OPS or not known.may_join(whole):
                continue
            known.join(whole)
            for member in bits_of(whole):
                group_of[member], domains[member] = whole, sizes[1]
    return [
        found
        for found in dict.fromkeys(group_of.values())
        if found.bit_count() > 1 or graph.ops[next(bits_of(found))].type in SINGLES
    ]


def _with_views(graph: Graph, known: Relatives, members: int) -> Group:
    own = set(bits_of(members))
    copies = set(_views_read(graph, known, own))
    return _group(graph, own, copies)


def _group(graph: Graph, own: Iterable[int], copies: Iterable[int]) -> Group:
    ops = tuple(graph.ops[position].id for position in sorted({*own, *copies}))
    return Group(ops, tuple(graph.ops[position].id for position in sorted(copies)))


def _views_read(graph: Graph, known: Relatives, positions: Iterable[int]) -> Iterator[int]:
    """The views between these ops and the makers of what they read."""
    waiting = [name for position in positions for name in graph.ops[position].reads()]
    while waiting:
        position = known.makers.get(waiting.pop())
        if position is not None and position in known.views:
            yield position
            waiting.append(next(graph.ops[position].reads()))


def _own_copies(
    graph: Graph, known: Relatives, groups: Sequence[Group], fusible: Sequence[bool]
) -> Iterator[Group]:
    """The groups of the backward half with copies of the pointwise forward ops that spare a kept value.

    A value is spared if groups of the backward half are its only readers there. It is worth its copies if the
    values that they are computed from are fewer bytes, counting those that are kept anyway as nothing.
    """
    position_of = {op.id: position for position, op in enumerate(graph.ops)}
    backward = [group for group in groups if graph.ops[position_of[group.own[0]]].phase is Phase.BACKWARD]
    spare = _Spared(graph, known, [set(map(position_of.__getitem__, g.ops)) for g in backward], fusible)
    spared = spare.found()
    for group in groups:
        if group not in backward:
            yield group
            continue
        own = {position_of[op] for op in group.own}
        copies = {position_of[op] for op in group.copies}
        waiting = [name for position in own | copies for name in graph.ops[position].reads()]
        while waiting:
            maker = known.makers.get(waiting.pop())
            if maker is None or maker in own or maker in copies:
                continue
            if maker in known.views or maker in spared:
                copies.add(maker)
                waiting += graph.ops[maker].reads()
        yield _group(graph, own, copies)


class _Spared:
    """Finds the forward ops whose results need not be kept for backward."""

    def __init__(
        self, graph: Graph, known: Relatives, backward: Sequence[set[int]], fusible: Sequence[bool]
    ) -> None:
        self._graph, self._known = graph, known
        self._outdated = outdated_tensors(graph)
        self._cheap = [
            may
            and op.phase is Phase.FORWARD
            and op.type in POINTWISE
            and self._outdated.isdisjoint(op.reads())
            for may, op in zip(fusible, graph.ops, strict=True)
        ]
        inside = set[int]().union(*backward) if backward else set[int]()
        self._kept_anyway, self._asked = self._readers(inside)

    def _readers(self, inside: set[int]) -> tuple[set[int], set[int]]:
        """The forward ops whose results other ops of the backward half read, and those that groups read."""
        anyway, asked = set[int](), set[int]()
        for position, op in enumerate(self._graph.ops):
            if op.phase is Phase.BACKWARD and position not in self._known.views:
                makers = (self._known.maker_behind(name) for name in op.reads())
                (asked if position in inside else anyway).update(m for m in makers if m is not None)
        held = (self._known.maker_behind(name) for name in self._graph.held)
        return anyway | {maker for maker in held if maker is not None}, asked - anyway

    def found(self) -> set[int]:
        """The ops to copy, found from the last on, so that what one copy needs can be spared in turn."""
        spared = set[int]()
        needed = {m for m in self._asked if self._graph.ops[m].phase is Phase.FORWARD}
        kept = self._kept_anyway | needed
        for position in sorted(needed, reverse=True):
            chain, sources = self._chain(position, kept)
            cost = sum(map(self._bytes_of, sources - kept))
            if chain and cost < self._bytes_of(position):
                spared |= chain
                kept = (kept - {position}) | sources
        return spared

    def _chain(self, position: int, kept: set[int]) -> tuple[set[int], set[int]]:
        """Cheap ops that lead to this one, and the makers of what they read; none if it is not cheap."""
        chain, sources, waiting = set[int](), set[int](), [position]
        while waiting:
            at = waiting.pop()
            if at != position and (at in kept or not self._cheap[at]):
                sources.add(at)
            elif not self._cheap[at]:
                return set(), set()
            elif at not in chain:
                chain.add(at)
                makers = (self._known.maker_behind(name) for name in self._graph.ops[at].reads())
                waiting += (maker for maker in makers if maker is not None)
        return chain, sources

    def _bytes_of(self, position: int) -> int:
        names = self._graph.ops[position].writes()
        return sum(self._graph.tensors[name].nbytes or 0 for name in names)
