"""Meaning: what each op of a graph reads and leaves, as versions of storages.

The order of the ops is what the graph means. A storage has version 0 if its contents come from outside the
step, and each write makes the next one: an op that makes the tensor, one that adds into it, an update of a
buffer or a parameter. A view writes nothing. So an op's operands are not tensors alone but versions, and a
list of steps computes the graph if each run of an op finds these versions, whatever ran before it.

Each device's generator of random numbers is such a storage too: every op that draws from it writes it once.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from stowplan.ir import Graph, Kind, Op, Phase, Role
from stowplan.ops.effects import UPDATES, Effect, effect_of
from stowplan.ops.table import site_of

Content: TypeAlias = tuple[str, int]
"""What a block of memory holds: a storage of the graph, and how often it was written."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """One op: the contents that its operands have when it runs, and those that it leaves.

    `operands` are what it reads, adds into or looks at. `makes` has what it leaves under each output that is
    no view, `changes` what it leaves in the place of an older version of the same storage. `draw` is its
    place among the ops of its device that draw random numbers, from 0; None if it draws none.
    """

    op: Op
    operands: tuple[tuple[str, Content], ...]
    makes: dict[str, Content]
    changes: dict[str, Content]
    draw: int | None


@dataclass(frozen=True, slots=True)
class GraphMeaning:
    """All ops by id, and the last version of each storage that is written."""

    ops: dict[str, Meaning]
    last: Counter[str]


def meaning_of(graph: Graph) -> GraphMeaning:
    """Walk the ops once."""
    storage_of, versions, draws = graph.storage_of, Counter[str](), Counter[str]()
    ops: dict[str, Meaning] = {}
    for op in graph.ops:
        added = tuple(use.tensor for use in op.outputs if use.role is Role.ACCUMULATE)
        needed = (*op.reads(), *added, *_owners_viewed(graph, op))
        operands = tuple((name, (root := storage_of(name), versions[root])) for name in needed)
        makes, changes = dict[str, Content](), dict[str, Content]()
        for use in op.outputs:
            name, root = use.tensor, storage_of(use.tensor)
            if use.role is Role.DATA and name == root:
                versions[root] += 1
                makes[name] = (root, versions[root])
            elif use.role is Role.ACCUMULATE or op.phase is Phase.UPDATE:
                versions[root] += 1
                changes[name] = (root, versions[root])
        for name in _parameters_updated(graph, op):
            root = storage_of(name)
            versions[root] += 1
            changes[name] = (root, versions[root])
        draw = None
        if effect_of(site_of(graph, op)) & Effect.RANDOM:
            draw = draws[op.device]
            draws[op.device] += 1
        ops[op.id] = Meaning(op, operands, makes, changes, draw)
    return GraphMeaning(ops, versions)


def _parameters_updated(graph: Graph, op: Op) -> Iterator[str]:
    if op.type in UPDATES:
        yield from (name for name in op.reads() if graph.tensors[name].kind is Kind.PARAMETER)


def _owners_viewed(graph: Graph, op: Op) -> Iterator[str]:
    """The owners of storages that the op makes views of without reading or making anything in them."""
    known = {graph.storage_of(name) for name in op.reads()} | set(op.writes())
    if op.phase is not Phase.UPDATE:
        yield from (root for name in op.writes() if (root := graph.storage_of(name)) not in known)
