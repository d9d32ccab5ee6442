"""Ops that look alike, as those of repeated layers do: what rules say of one of them holds for all."""

from collections.abc import Hashable

from stowplan.ir import Graph, Op
from stowplan.ops.regions import Regions, regions_of
from stowplan.ops.table import Site, site_of


class AlikeOps:
    """The ops of a graph by their looks, and their regions, worked out once for each look.

    Where regions give a reason, it may name another op of the same look.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._looks: dict[Hashable, int] = {}
        self._numbers: dict[str, int] = {}  # by op
        self._regions: dict[int, Regions] = {}

    def number(self, op: Op) -> int:
        """The same for ops that look alike."""
        found = self._numbers.get(op.id)
        if found is None:
            found = self._looks.setdefault(look_of(site_of(self._graph, op)), len(self._looks))
            self._numbers[op.id] = found
        return found

    def regions(self, op: Op) -> Regions:
        """The regions of an op."""
        number = self.number(op)
        if number not in self._regions:
            self._regions[number] = regions_of(site_of(self._graph, op))
        return self._regions[number]


def look_of(site: Site) -> Hashable:
    """What answers about an op depend on, but for names."""
    tensors = (*site.inputs, *site.outputs)
    places = {tensor.id: place for place, tensor in reversed(list(enumerate(tensors)))}
    looks = tuple(
        (t.kind, t.shape, t.dtype, t.nbytes, t.layout, places[t.id], t.alias_of is None) for t in tensors
    )
    return site.op.type, repr(site.attributes), len(site.inputs), looks
