"""Backward footprint: the memory that is live around a segment while the segment is differentiated.

It holds the segment's inputs, the gradients of its inputs, of its outputs and of tensors that bypass it, the
inputs of the step, all parameters, and the gradients of the parameters that this segment and later ops read.
Everything else can be recomputed.
"""

from collections.abc import Iterable, Sequence

from stowplan.analyse.facts import estimated_workspaces
from stowplan.ir import Graph, Kind, Phase


class BackwardFootprint:
    """Finds the backward footprint of segments of one graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
        self._place = {op.id: place for place, op in enumerate(self._forward)}
        self._made = {name: place for place, op in enumerate(self._forward) for name in op.writes()}
        self._readers: dict[str, list[int]] = {}
        for place, op in enumerate(self._forward):
            for name in op.reads():
                self._readers.setdefault(name, []).append(place)
        self._parameters = {name for name, t in graph.tensors.items() if t.kind is Kind.PARAMETER}
        self._kernels = _kernels(graph)

    @property
    def standing_bytes(self) -> int:
        """The bytes of all parameters and their gradients, and of the step's inputs."""
        outside = self._readers.keys() - self._made.keys() - self._parameters
        return 2 * self._bytes(self._parameters) + self._bytes(outside)

    def beside(self, ops: Sequence[str]) -> int:
        """The live bytes around these ops, without the tensors inside them."""
        first, last = self._place[ops[0]], self._place[ops[-1]]
        total = self._bytes(self._parameters)
        for name, places in self._readers.items():
            total += self._bytes([name]) * self._times(name, places, first, last)
        return total

    def _times(self, name: str, places: Sequence[int], first: int, last: int) -> int:
        """How many copies of a tensor's bytes are live: the tensor, its gradient, both or none."""
        if name in self._parameters:
            return int(places[-1] >= first)
        if name not in self._made:
            return 1
        made = self._made[name]
        if made >= first:
            return int(made <= last < places[-1])
        is_read = any(first <= place <= last for place in places)
        return is_read + int(is_read or places[-1] > last)

    def kernels(self, ops: Sequence[str], tiles: int = 1) -> int:
        """A rough estimate of a kernel's workspace: divided by the tiles, but at least its weight."""
        whole = max(self._kernels[op] for op in ops) // tiles
        return whole if tiles == 1 else max(whole, *map(self._weight_bytes, ops))

    def _weight_bytes(self, op: str) -> int:
        return self._bytes(self._parameters.intersection(self._forward[self._place[op]].reads()))

    def _bytes(self, names: Iterable[str]) -> int:
        return sum(self._graph.tensors[name].nbytes or 0 for name in names)


def _kernels(graph: Graph) -> dict[str, int]:
    """By forward op, the larger estimated workspace of the op and its adjoint."""
    found: dict[str, int] = {}
    estimated = estimated_workspaces(graph)
    for op in graph.ops:
        name = op.adjoint_of or op.id
        found[name] = max(estimated[op.id], found.get(name, 0))
    return found
