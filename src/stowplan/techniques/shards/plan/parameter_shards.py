"""Sharded parameters as they are projected: what gathers and sums send, and what a worker's memory becomes.

Each group of parameters is gathered for forward, dropped, and gathered again for backward; its gradients end
when they are summed. This is the step in the smallest budget. In a larger one some gathers are not repeated.

Of a weight that a `model` axis cuts, a worker gathers the part that its ops read. A worker that has rows of
the weight sends each other worker what these rows and the other's part have in common.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from stowplan.analyse.facts import liveness_of, memory_curve
from stowplan.geometry import Rect
from stowplan.ir import Graph, Kind, Phase, Shape
from stowplan.ops.table import shape_of
from stowplan.ops.windows import Span
from stowplan.techniques.shards.plan.buckets import buckets_of
from stowplan.techniques.shards.plan.cells import Cells
from stowplan.techniques.shards.plan.plan import ShardPlan
from stowplan.techniques.shards.plan.propagation import forward_ops
from stowplan.techniques.shards.plan.traffic import itemsize_of
from stowplan.techniques.shards.plan.weights import model_axis

Counts: TypeAlias = NDArray[np.int64]

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
class ParameterPart:
    """The part of a parameter that a worker reads: by dim, the runs of indices that make it up, in order."""

    runs: tuple[tuple[Span, ...], ...]

    @staticmethod
    def whole(shape: Shape) -> "ParameterPart":
        """All of a parameter; a number is a vector of one."""
        return ParameterPart(tuple(((0, size),) for size in shape or (1,)))

    @staticmethod
    def of_rect(cells: Cells, rect: Rect) -> "ParameterPart":
        """The indices that a rect over cells has."""
        dims = range(len(cells.groups))
        return ParameterPart(tuple(tuple(_runs(cells.groups[dim], cells.spans(rect, dim))) for dim in dims))

    @property
    def shape(self) -> Shape:
        return tuple(sum(high - low for low, high in runs) for runs in self.runs)

    def blocks(self, rows: Span) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """What the part has of these rows: where in the rows, and where in the part."""
        first, end = rows
        placed = [list(_placed(runs)) for runs in self.runs]
        clipped = ((max(low, first), min(high, end), at + max(0, first - low)) for low, high, at in placed[0])
        placed[0] = [(low - first, high - first, at) for low, high, at in clipped if low < high]
        return [
            (
                tuple(slice(low, high) for low, high, _ in block),
                tuple(slice(at, at + high - low) for low, high, at in block),
            )
            for block in product(*placed)
        ]

    def elements(self, rows: Span) -> int:
        """How many elements the part has of these rows."""
        return int(self.elements_of(*(np.array([bound]) for bound in rows))[0])

    def elements_of(self, first: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
        """The same of the rows of several workers."""
        shared = sum(
            (np.clip(np.minimum(end, high) - np.maximum(first, low), 0, None) for low, high in self.runs[0]),
            np.zeros_like(first),
        )
        return shared * prod(self.shape[1:])


def _runs(group: tuple[int, ...], spans: Sequence[Span]) -> Iterator[Span]:
    """The indices of a dim, in runs, that spans of its cells have."""
    (low, high), *rest = spans
    below = prod(group[1:])
    if all(span == (0, size) for span, size in zip(rest, group[1:], strict=True)):
        yield low * below, high * below
        return
    for index in range(low, high):
        yield from ((index * below + a, index * below + b) for a, b in _runs(group[1:], rest))


def _placed(runs: Sequence[Span]) -> Iterator[tuple[int, int, int]]:
    """Each run with the place in the part where it begins."""
    starts = accumulate((high - low for low, high in runs), initial=0)
    return ((low, high, at) for (low, high), at in zip(runs, starts, strict=False))


def part_of(plan: ShardPlan, name: str, worker: int) -> ParameterPart:
    """The part of a parameter that a worker reads."""
    layout = plan.layouts[name]
    share = layout.share(plan.mesh, worker)
    held = plan.shards[worker].held.get(name, Rect(share.lo, share.lo)) if worker in plan.shards else share
    return ParameterPart.of_rect(layout.cells, held)


@dataclass(frozen=True, slots=True)
class ParameterTraffic:
    """By worker the bytes that gathers and sums of parameters send; how many of both there are in a step."""

    sent_bytes: NDArray[np.int64]
    collectives: int


class DividedParameters:
    """The parameters of a step, divided by rows over a number of workers.

    With the `plan` of a mesh that has a `model` axis, workers gather parts of the weights that it cuts.
    """

    def __init__(self, graph: Graph, workers: int, plan: ShardPlan | None = None) -> None:
        self._graph, self._workers = graph, workers
        self._places = np.zeros(workers, np.int64)  # of each worker on the `model` axis
        self._parts: Mapping[
            str, tuple[ParameterPart, ...]
        ] = {}  # by weight that the axis cuts, of each place
        self._known: dict[Hashable, tuple[Counts, Counts, Counts]] = {}  # elements of parameters alike
        axis = None if plan is None else model_axis(plan.mesh)
        if plan is not None and axis is not None:
            size = plan.mesh.axes[axis].size
            self._places = np.arange(workers) // prod(a.size for a in plan.mesh.axes[axis + 1 :]) % size
            firsts = [plan.mesh.on_axis(axis, place) for place in range(size)]
            self._parts = {n: tuple(part_of(plan, n, w) for w in firsts) for n in plan.cut_weights}
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
                given, own, whole = self._elements(name)
                itemsize = itemsize_of(self._graph, name)
                sent += (gathers * (given - own) + is_trained * (whole - own)) * itemsize
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
        """From where to where gathered parameters are there, with their bytes."""
        for group in self._groups:
            for used in self._used.values():
                read = {name: used[name] for name in group if name in used}
                first = min((positions[0] for positions in read.values()), default=0)
                for name, positions in read.items():
                    *apart, last = self._uses(positions)
                    yield first, (apart[0] if apart else last)[-1] + 1, self._part(name)
                    yield from ((last[0], last[-1] + 1, self._part(name)) for _ in apart)

    def _summed(self, graph: Graph) -> Iterator[tuple[int, int, int]]:
        """From where on gradients are smaller than whole ones, as bytes below 0."""
        made = {graph.storage_of(name): at for at, op in enumerate(graph.ops) for name in op.writes()}
        for group in self._groups:
            trained = [name for name in group if name in self._gradients]
            ends = [made.get(graph.storage_of(self._gradients[name]), len(graph.ops) - 1) for name in trained]
            for name, end in zip(trained, ends, strict=True):
                yield end, max(ends) + 1, self._part(name) - self._whole(name)
                yield max(ends) + 1, len(graph.ops), self._shard(name) - self._whole(name)

    def _uses(self, positions: Sequence[int]) -> list[Sequence[int]]:
        """The uses of a parameter: two if it is read at both ends of the step, each with its own gather."""
        gaps = np.diff(positions)
        if not len(gaps) or gaps.max() <= self._half:
            return [positions] if len(positions) else []
        at = int(gaps.argmax()) + 1
        return [positions[:at], positions[at:]]

    def _elements(self, name: str) -> tuple[Counts, Counts, Counts]:
        """By worker: elements of its rows, once for each reader; those it reads itself; all that it reads."""
        parts = self._parts.get(name) or (ParameterPart.whole(shape_of(self._graph.tensors[name])),)
        look = self._row_count(name), parts, name in self._parts
        if look not in self._known:
            self._known[look] = self._counted(self._rows(name), parts, is_cut=name in self._parts)
        return self._known[look]

    def _counted(
        self, rows: Counts, parts: Sequence[ParameterPart], *, is_cut: bool
    ) -> tuple[Counts, Counts, Counts]:
        end = rows.cumsum()
        places = self._places if is_cut else np.zeros_like(self._places)
        read = np.stack([part.elements_of(end - rows, end) for part in parts])
        given = (np.bincount(places, minlength=len(parts))[:, None] * read).sum(axis=0)
        whole = np.array([prod(part.shape) for part in parts])[places]
        return given, read[places, np.arange(self._workers)], whole

    def _row_count(self, name: str) -> int:
        return next(iter(shape_of(self._graph.tensors[name])), 1)

    def _rows(self, name: str) -> Counts:
        """How many rows each worker has."""
        count = self._row_count(name)
        each = -(-count // self._workers)
        return np.clip(count - each * np.arange(self._workers), 0, each)

    def _row_bytes(self, name: str) -> int:
        tensor = self._graph.tensors[name]
        return (tensor.nbytes or 0) // max(1, self._row_count(name))

    def _whole(self, name: str) -> int:
        return self._graph.tensors[name].nbytes or 0

    def _part(self, name: str) -> int:
        """Bytes of the largest part of a parameter that a worker reads."""
        largest = max((prod(part.shape) for part in self._parts.get(name, ())), default=0)
        return largest * itemsize_of(self._graph, name) if largest else self._whole(name)

    def _shard(self, name: str) -> int:
        """Bytes of the rows of the first worker, which has the most."""
        return -(-self._row_count(name) // self._workers) * self._row_bytes(name)
