"""The fused step: a graph in which each group is one op.

The op reads what its group reads from outside, and makes only what somebody outside reads. What nobody reads
any more is gone: inner tensors, views of them, and forward ops that every reader computes for itself. Ops
keep their order; a group runs as soon as it can after the place of its first op.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from stowplan.errors import InvalidGraph
from stowplan.ir import Attributes, Graph, Op, Phase, Role, Use, validate
from stowplan.ops.effects import FUSED, effect_of, only_updates_statistics
from stowplan.ops.table import site_of
from stowplan.plan.problem import outdated_tensors
from stowplan.techniques.kernels.plan.dependencies import order_kept
from stowplan.techniques.kernels.plan.formation import Group

_NAME = "fused_"
Describe = Callable[["Fused"], Attributes]


@dataclass(frozen=True, slots=True)
class Fused:
    """A group with the tensors that go in and come out, each in the order of first use or making."""

    group: Group
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def borders_of(graph: Graph, groups: Sequence[Group]) -> tuple[Fused, ...]:
    """What goes in and comes out of each group, when all of them are fused."""
    ops = {op.id: op for op in graph.ops}
    alive = _alive(graph, groups)
    inside = {op: group for group in groups for op in group.own}
    wanted = set(graph.held)
    for op in graph.ops:
        if op.id in alive and op.id not in inside:
            wanted.update(use.tensor for use in op.inputs)
    inputs = {group: tuple(_read_from_outside(ops, group)) for group in groups}
    wanted.update(name for names in inputs.values() for name in names)
    return tuple(
        Fused(group, inputs[group], tuple(n for op in group.own for n in ops[op].writes() if n in wanted))
        for group in groups
    )


def fused_graph(graph: Graph, groups: Sequence[Group], describe: Describe) -> Graph:
    """The graph with an op for each group, whose attributes `describe` gives; raises InvalidGraph.

    Groups that have ops in common, or that would have to run before each other, are refused.
    """
    own = {op for group in groups for op in group.own}
    if len(own) < sum(len(group.own) for group in groups):
        raise InvalidGraph("two groups compute the same op")
    position_of = {op.id: position for position, op in enumerate(graph.ops)}
    alive = _alive(graph, groups)
    ops = [op for op in graph.ops if op.id in alive and op.id not in own]
    places: dict[str, tuple[int, ...]] = {op.id: (position_of[op.id],) for op in ops}
    op_of = _OpOfGroup(graph, describe)
    for number, fused in enumerate(borders_of(graph, groups)):
        if not fused.outputs:  # all of its readers compute it for themselves
            continue
        op = op_of(fused, name_of(number))
        ops.append(op)
        places[op.id] = tuple(position_of[member] for member in fused.group.ops)
    ordered = _ordered(graph, ops, places)
    made = {name for op in ordered for name in op.writes()}
    before = {name for op in graph.ops for name in op.writes()}
    tensors = {n: t for n, t in graph.tensors.items() if n in made or n not in before}
    tensors = {
        n: t if t.gradient_of is None or t.gradient_of in tensors else replace(t, gradient_of=None)
        for n, t in tensors.items()
    }
    ids = {op.id for op in ordered}
    ordered = [op if op.adjoint_of in ids else replace(op, adjoint_of=None) for op in ordered]
    return validate(Graph(tensors, tuple(ordered), graph.held, graph.name))


class _OpOfGroup:
    """The op that a group of one graph becomes."""

    def __init__(self, graph: Graph, describe: Describe) -> None:
        self._graph, self._describe = graph, describe
        self._ops = {op.id: op for op in graph.ops}
        self._forward = {n for op in graph.ops if op.phase is Phase.FORWARD for n in op.writes()}
        self._outdated = outdated_tensors(graph)

    def __call__(self, fused: Fused, name: str) -> Op:
        group = fused.group
        first = self._ops[group.own[0]]
        saved = self._forward if first.phase is Phase.BACKWARD else ()
        members = (self._ops[op] for op in group.ops)
        readers = (op for op in members if not self._outdated.isdisjoint(op.reads()))
        statistics = all(only_updates_statistics(site_of(self._graph, op)) for op in readers)
        attributes: Attributes = {"ops": group.ops, "copies": group.copies, "statistics": statistics}
        return Op(
            name,
            FUSED,
            first.phase,
            tuple(Use(n, Role.SAVED if n in saved else Role.DATA) for n in fused.inputs),
            tuple(map(Use, fused.outputs)),
            {**attributes, **self._describe(fused)},
            first.device,
            None,
            first.scope,
            first.source,
        )


def name_of(number: int) -> str:
    """The op of a group, by its number among the groups."""
    return f"{_NAME}{number}"


def groups_in(graph: Graph) -> tuple[Group, ...]:
    """The groups of a fused graph, in the order in which they were fused; raises InvalidGraph."""
    found = {}
    for op in graph.ops:
        if op.type == FUSED:
            ops, copies = op.attributes.get("ops"), op.attributes.get("copies")
            number = op.id.removeprefix(_NAME)
            if not isinstance(ops, tuple) or not isinstance(copies, tuple) or not number.isdigit():
                raise InvalidGraph(f"{op.id!r} does not say which ops it computes")
            found[int(number)] = Group(tuple(map(str, ops)), tuple(map(str, copies)))
    return tuple(found[number] for number in sorted(found))


def _read_from_outside(ops: Mapping[str, Op], group: Group) -> Iterator[str]:
    made = {name for op in group.ops for name in ops[op].writes()}
    yield from dict.fromkeys(name for op in group.ops for name in ops[op].reads() if name not in made)


def _alive(graph: Graph, groups: Sequence[Group]) -> set[str]:
    """The ops that still run, alone or in a group: those with effects, and those that somebody reads."""
    group_of = {op: group for group in groups for op in group.own}
    ops = {op.id: op for op in graph.ops}
    inputs = {group: set(_read_from_outside(ops, group)) for group in groups}
    wanted, alive, done = set(graph.held), set[str](), set[Group]()
    for op in reversed(graph.ops):
        effects = op.phase not in (Phase.FORWARD, Phase.BACKWARD) or effect_of(site_of(graph, op))
        group = group_of.get(op.id)
        if not (effects or group or not wanted.isdisjoint(op.writes())):
            continue
        alive.add(op.id)
        if group is None:
            wanted.update(use.tensor for use in op.inputs)
        elif group not in done:
            done.add(group)
            wanted |= inputs[group]
    return alive


def _ordered(graph: Graph, ops: Collection[Op], places: Mapping[str, tuple[int, ...]]) -> list[Op]:
    """The ops in an order in which each finds what it reads, as near to the graph's as it can be."""
    by_id = {op.id: op for op in ops}
    makers = {name: op.id for op in ops for name in op.writes()}
    node_of: dict[int, list[str]] = {}
    for name, positions in places.items():
        for position in positions:
            node_of.setdefault(position, []).append(name)
    before: dict[str, set[str]] = {op.id: set() for op in ops}
    for op in ops:
        before[op.id].update(makers[use.tensor] for use in op.inputs if use.tensor in makers)
    for earlier, later in order_kept(graph):
        for one in node_of.get(earlier, ()):
            for other in node_of.get(later, ()):
                if one != other:
                    before[other].add(one)
    after: dict[str, list[str]] = {op.id: [] for op in ops}
    for name, earlier_ones in before.items():
        for one in earlier_ones:
            after[one].append(name)
    first = {name: min(_own_places(by_id[name], graph, positions)) for name, positions in places.items()}
    missing = {name: len(earlier_ones) for name, earlier_ones in before.items()}
    ready = [(first[name], name) for name, count in missing.items() if not count]
    heapify(ready)
    ordered = list[Op]()
    while ready:
        _, name = heappop(ready)
        ordered.append(by_id[name])
        for other in after[name]:
            missing[other] -= 1
            if not missing[other]:
                heappush(ready, (first[other], other))
    if len(ordered) < len(by_id):
        stuck = next(name for name, count in missing.items() if count)
        raise InvalidGraph(f"the groups leave no order in which {stuck!r} can run")
    return ordered


def _own_places(op: Op, graph: Graph, positions: tuple[int, ...]) -> tuple[int, ...]:
    """Where its ops of the same half stood: a copy of a forward op says nothing about when backward runs."""
    own = tuple(position for position in positions if graph.ops[position].phase is op.phase)
    return own or positions
