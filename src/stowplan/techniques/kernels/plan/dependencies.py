"""What must run before what, with ops as numbers and sets of them as the bits of an integer.

Views are no nodes of it: who reads a view depends on the op that made the storage. Beside the data, the order
of ops with effects is kept, and that of reading a buffer or parameter and overwriting it.
"""

from collections.abc import Iterator, Mapping

from stowplan.ir import Graph, Kind, Op, Phase
from stowplan.ops.effects import UPDATE, Effect, effect_of
from stowplan.ops.table import site_of
from stowplan.techniques.kernels.plan.fusible import is_view


class Relatives:
    """Ancestors and descendants of each op by position, while ops are joined to groups one by one."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.makers = {name: position for position, op in enumerate(graph.ops) for name in op.writes()}
        self.views = frozenset(position for position, op in enumerate(graph.ops) if is_view(graph, op))
        before = _direct(graph, self)
        self._above = [0] * len(graph.ops)
        self._below = [0] * len(graph.ops)
        for position, earlier in enumerate(before):
            self._above[position] = earlier
            for parent in bits_of(earlier):
                self._above[position] |= self._above[parent]
        for position in range(len(before) - 1, -1, -1):
            for parent in bits_of(before[position]):
                self._below[parent] |= self._below[position] | 1 << position

    def maker_behind(self, name: str) -> int | None:
        """The op, other than a view, that made what a tensor shows; None for what comes from outside."""
        position = self.makers.get(name)
        while position is not None and position in self.views:
            position = self.makers.get(next(self.graph.ops[position].reads()))
        return position

    def may_join(self, members: int) -> bool:
        """Whether no path leaves the set and returns to it."""
        above, below = self._around(members)
        return not above & below & ~members

    def join(self, members: int) -> None:
        """From now on the members run together: what is before one of them is before all."""
        above, below = self._around(members)
        above, below = above & ~members, below & ~members
        for position in bits_of(above | members):
            self._below[position] |= below | members
        for position in bits_of(below | members):
            self._above[position] |= above | members

    def _around(self, members: int) -> tuple[int, int]:
        above = below = 0
        for position in bits_of(members):
            above |= self._above[position]
            below |= self._below[position]
        return above, below


def bits_of(number: int) -> Iterator[int]:
    """The positions of the bits that are set."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def _direct(graph: Graph, known: Relatives) -> list[int]:
    """By op, those that must come before it; data between views is followed to its maker."""
    before = [0] * len(graph.ops)
    for position, op in enumerate(graph.ops):
        if position not in known.views:
            for use in op.inputs:
                maker = known.maker_behind(use.tensor)
                before[position] |= 0 if maker is None else 1 << maker
    for earlier, later in order_kept(graph):
        if known.views.isdisjoint((earlier, later)):
            before[later] |= 1 << earlier
    return before


def order_kept(graph: Graph) -> Iterator[tuple[int, int]]:
    """Pairs of ops whose order is no matter of data: effects, and the reads around a write in place."""
    written = {position: set(written_storages(graph, op)) for position, op in enumerate(graph.ops)}
    changed = set[str]().union(*written.values())
    last_effect: int | None = None
    readers: Mapping[str, list[int]] = {name: [] for name in changed}
    writer: dict[str, int] = {}
    for position, op in enumerate(graph.ops):
        if (
            op.phase not in (Phase.FORWARD, Phase.BACKWARD)
            or effect_of(site_of(graph, op)) is not Effect.NONE
        ):
            if last_effect is not None:
                yield last_effect, position
            last_effect = position
        touched = {graph.storage_of(name) for name in op.reads()} & changed
        for name in touched - written[position]:
            if name in writer:
                yield writer[name], position
            readers[name].append(position)
        for name in written[position]:
            yield from ((reader, position) for reader in readers[name])
            if name in writer:
                yield writer[name], position
            writer[name], readers[name][:] = position, []


def written_storages(graph: Graph, op: Op) -> Iterator[str]:
    """The buffers and parameters that an op overwrites."""
    if op.phase is Phase.UPDATE:
        yield from (graph.storage_of(name) for name in op.writes())
    if op.type == UPDATE:
        yield from (name for name in op.reads() if graph.tensors[name].kind is Kind.PARAMETER)
