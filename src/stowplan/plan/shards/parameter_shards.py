"""Sharded parameters as they are projected: what gathers and sums send, and what a worker's memory becomes.

Each group of parameters is gathered for forward, dropped, and gathered again for backward; its gradients end
when they are summed. This is the step in the smallest budget. In a larger one some gathers are not repeated.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stowplan.analyse.facts import liveness_of, memory_curve
from stowplan.ir import Graph, Kind, Phase
from stowplan.ops.table import shape_of
from stowplan.plan.shards.buckets import buckets_of
from stowplan.plan.shards.propagation import forward_ops

_MOST_BYTES = 4 * 2**20  # of parameters that are gathered together: a plan keeps or drops them together
_LEAST_BYTES = 2**14
_GROUPS = 16  # of a small model as well


def gather_groups(graph: Graph, divided: Iterable[str], trained: Iterable[str]) -> list[tuple[str, ...]]:
    """The divided parameters that are gathered together, in the order of first uses."""
    divided, trained = list(divided), frozenset(trained)
    total = sum(graph.tensors[name].nbytes or 0 for name in divided)
    most_bytes = min(_MOST_BYTES, max(_LEAST_BYTES, total // _GROUPS))
    used: dict[str, int] = {}
    for number, op in enumerate(forward_ops(graph)):
        for name in op.reads():
            used.setdefault(name, number)
    kinds = (
        [name for name in divided if name in used and (name in trained) is kind] for kind in (True, False)
    )
    groups = [group for names in kinds for group in buckets_of(graph, names, most_bytes=most_bytes)]
    return sorted(groups, key=lambda group: min(used[name] for name in group))


@dataclass(frozen=True, slots=True)
class ParameterTraffic:
    """By worker the bytes that gathers and sums of parameters send; how many of both there are in a step."""

    sent_bytes: NDArray[np.int64]
    collectives: int


class DividedParameters:
    """The parameters of a step, divided by rows over a number of workers."""

    def __init__(self, graph: Graph, workers: int) -> None:
        self._graph, self._workers = graph, workers
        gradients = {t.gradient_of: name for name, t in graph.tensors.items() if t.gradient_of is not None}
        self._names = [name for name, tensor in graph.tensors.items() if tensor.kind is Kind.PARAMETER]
        self._gradients = {name: gradients[name] for name in self._names if name in gradients}
        self._groups = gather_groups(graph, self._names, self._gradients)
        self._half = sum(1 for _ in forward_ops(graph)) // 2
        self._used: dict[Phase, dict[str, list[int]]] = {Phase.FORWARD: {}, Phase.BACKWARD: {}}
        for position, op in enumerate(graph.ops):
            for name in op.reads() if op.phase in self._used else ():
                self._used[op.phase].setdefault(graph.storage_of(name), []).append(position)

    def traffic(self, *, again: bool = True) -> ParameterTraffic:
        """What the gathers and sums send; `again`, if parameters are gathered again for backward."""
        sent, collectives = np.zeros(self._workers, np.int64), 0
        uses = {
            name: [len(self._uses(used.get(name, ()))) for used in self._used.values()]
            for name in self._names
        }
        groups = [(group, any(uses[name][1] for name in group)) for group in self._groups]
        groups += [((name,), backward > 1) for name, (forward, backward) in uses.items() if forward > 1]
        for group, is_read_in_backward in groups:
            is_trained = group[0] in self._gradients
            gathers = 1 + (again and is_read_in_backward)
            collectives += gathers + is_trained
            for name in group:
                rows, row_bytes = self._rows(name), self._row_bytes(name)
                sent += gathers * rows * row_bytes * (self._workers - 1)
                sent += is_trained * (rows.sum() - rows) * row_bytes
        return ParameterTraffic(sent, collectives)

    def peak_bytes(self, graph: Graph) -> int:
        """The peak of a worker; `graph` has the tensors as large as its parts of them."""
        liveness = liveness_of(graph)
        curve = memory_curve(graph, liveness)
        change = np.zeros(len(graph.ops) + 1, np.int64)
        for start, end, nbytes in (*self._gathered(), *self._summed(graph)):
            change[start] += nbytes
            change[end] -= nbytes
        saved = sum(self._whole(name) - self._shard(name) for name in self._names)
        return int((curve + np.cumsum(change[:-1]) - saved).max())

    def _gathered(self) -> Iterator[tuple[int, int, int]]:
        """From where to where whole parameters are there, with their bytes."""
        for group in self._groups:
            for used in self._used.values():
                read = {name: used[name] for name in group if name in used}
                first = min((positions[0] for positions in read.values()), default=0)
                for name, positions in read.items():
                    *apart, last = self._uses(positions)
                    yield first, (apart[0] if apart else last)[-1] + 1, self._whole(name)
                    yield from ((last[0], last[-1] + 1, self._whole(name)) for _ in apart)

    def _summed(self, graph: Graph) -> Iterator[tuple[int, int, int]]:
        """From where on whole gradients are no longer there, as bytes below 0."""
        made = {graph.storage_of(name): at for at, op in enumerate(graph.ops) for name in op.writes()}
        for group in self._groups:
            trained = [name for name in group if name in self._gradients]
            ends = [made.get(graph.storage_of(self._gradients[name]), len(graph.ops) - 1) for name in trained]
            for name in trained:
                yield max(ends) + 1, len(graph.ops), self._shard(name) - self._whole(name)

    def _uses(self, positions: Sequence[int]) -> list[Sequence[int]]:
        """The uses of a parameter: two if it is read at both ends of the step, each with its own gather."""
        gaps = np.diff(positions)
        if not len(gaps) or gaps.max() <= self._half:
            return [positions] if len(positions) else []
        at = int(gaps.argmax()) + 1
        return [positions[:at], positions[at:]]

    def _rows(self, name: str) -> NDArray[np.int64]:
        """How many rows each worker has."""
        count = next(iter(shape_of(self._graph.tensors[name])), 1)
        each = -(-count // self._workers)
        return np.clip(count - each * np.arange(self._workers), 0, each)

    def _row_bytes(self, name: str) -> int:
        tensor = self._graph.tensors[name]
        return (tensor.nbytes or 0) // max(1, next(iter(shape_of(tensor)), 1))

    def _whole(self, name: str) -> int:
        return self._graph.tensors[name].nbytes or 0

    def _shard(self, name: str) -> int:
        return int(self._rows(name)[0]) * self._row_bytes(name)
