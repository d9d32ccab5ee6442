"""The baseline: every op once, in the graph's order, each tensor freed after its last reader.

If an input dies with an op and the op can overwrite it, it does: the baseline then needs no more memory than
eager, whose in-place ops capture has functionalised.
"""

from collections.abc import Iterator

from stowplan.analyse.facts import Storages, is_resident, storages_of
from stowplan.ir import Graph, Op
from stowplan.ops.aliasing import aliasing_of
from stowplan.ops.table import site_of
from stowplan.plan.plan import Compute, Free, Step


def baseline_steps(graph: Graph) -> tuple[Step, ...]:
    """The steps of the baseline: Compute and Free, nothing else."""
    return tuple(_BaselineWalk(graph).steps())


class _BaselineWalk:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._storages: Storages = storages_of(graph)
        self._last: dict[str, int] = {}  # by tensor
        self._made: set[int] = set()  # storages that an op of the step makes
        for position, op in enumerate(graph.ops):
            self._last.update((name, position) for name in (*op.reads(), *op.writes()))
            self._made.update(map(self._storage, filter(self._owns, op.writes())))
        staying = graph.held.union(name for name, tensor in graph.tensors.items() if is_resident(tensor))
        self._last.update((name, len(graph.ops)) for name in staying)
        self._storage_last: dict[int, int] = {}
        for name, position in self._last.items():
            known = self._storage_last.get(self._storage(name), 0)
            self._storage_last[self._storage(name)] = max(known, position)

    def steps(self) -> Iterator[Step]:
        for position, op in enumerate(self._graph.ops):
            yield Compute(op.id, tuple(self._overwrites(position, op)))
            gone = tuple(n for n in dict.fromkeys((*op.reads(), *op.writes())) if self._last[n] == position)
            if gone:
                yield Free(gone)

    def _storage(self, name: str) -> int:
        return self._storages.number_of[name]

    def _owns(self, name: str) -> bool:
        return self._graph.tensors[name].alias_of is None

    def _overwrites(self, position: int, op: Op) -> Iterator[tuple[str, str]]:
        """Outputs with the inputs whose storage they take. It then lives as long as the output."""
        site = site_of(self._graph, op)
        for output, candidates in aliasing_of(site).in_place_of.items():
            made = site.outputs[output]
            for victim in (site.inputs[candidate] for candidate in candidates):
                storage = self._storage(victim.id)
                ends = storage in self._made and self._storage_last[storage] == position
                if ends and made.alias_of is None and made.nbytes == self._storages.nbytes[storage]:
                    yield made.id, victim.id
                    break
