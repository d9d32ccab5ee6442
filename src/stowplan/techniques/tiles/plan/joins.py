"""Joined stages: the tensors between two stages of one segment are never whole, and neither are their
gradients.

The forward half is divided into pieces: one or several stages on a grid, or a stage without tiles. For a
limit on the memory of each piece while it is differentiated, the division with the least work is found. Lower
and lower limits give tilings from the least work to the least memory. A tiling is used if every one with less
memory costs clearly more work.

Backward footprint: the memory that is live around a segment while the segment is differentiated.

It holds the segment's inputs, the gradients of its inputs, of its outputs and of tensors that bypass it, the
inputs of the step, all parameters, and the gradients of the parameters that this segment and later ops read.
Everything else can be recomputed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from math import inf, prod

from stowplan.analyse.facts import estimated_workspaces
from stowplan.ir import Graph, Kind, Phase
from stowplan.ops.effects import macs_of
from stowplan.ops.regions import Partial
from stowplan.ops.statistics import statistic_of
from stowplan.ops.table import site_of
from stowplan.plan.select import Refusals
from stowplan.techniques.tiles.plan.barriers import is_barrier
from stowplan.techniques.tiles.plan.candidates import Tiled, Tiling, grids_tried, stages_of
from stowplan.techniques.tiles.plan.collapse import extra_macs_of


class BackwardFootprint:
    """Finds the backward footprint of segments of one graph; without a backward half, that of forward."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._has_gradients = graph, graph.has_backward
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
        return (1 + self._has_gradients) * self._bytes(self._parameters) + self._bytes(outside)

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
            return int(self._has_gradients and places[-1] >= first)
        if name not in self._made:
            return 1
        made = self._made[name]
        if made >= first:
            return int(made <= last < places[-1])
        if not self._has_gradients:
            return int(places[-1] >= first)
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


_JOINED = 3  # stages between valleys in one segment at most
_FINEST = 64  # tiles
_DEARER = 0.01  # of the step's work: a division that saves less is not worth its additional memory
_PART = 2**25  # bytes: the allocator returns larger blocks to the system instead of reusing them
_MANY = 16  # stages: in more of them none is large enough to be worth the time that all joins take
_LOWER = 0.04  # of the previous tiling's memory without parameters and gradients: a smaller saving is ignored


@dataclass(frozen=True, slots=True)
class JoinedStages:
    """Some stages, in tiles or not: what is needed to differentiate them, and the work that tiles add."""

    stages: int
    tiled: Tiled | None
    peak_bytes: int
    extra_macs: int


@dataclass(frozen=True, slots=True)
class Division:
    """All of the forward half in pieces."""

    pieces: tuple[JoinedStages, ...] = ()
    extra_macs: float = 0

    @property
    def peak_bytes(self) -> int:
        return max(piece.peak_bytes for piece in self.pieces)

    @property
    def tiling(self) -> Tiling:
        return tuple(piece.tiled for piece in self.pieces if piece.tiled)


def divided_tilings(graph: Graph, refusals: Refusals) -> Iterator[Tiling]:
    """Tilings by falling need of memory, with stages joined where that gains; none where none can be."""
    stages = stages_of(graph)
    if not any(_can_join(graph, (*one, *other)) for one, other in pairwise(stages)):
        return
    barriers = {op.id for op in graph.ops if is_barrier(graph, op)}
    if sum(barriers.isdisjoint(stage) for stage in stages) > _MANY:
        return
    need = BackwardFootprint(graph)
    divisions = list(_divisions(_pieces(graph, need, stages, refusals), need.standing_bytes))
    step_macs = sum(macs_of(site_of(graph, op)) for op in graph.ops)
    yield from (each.tiling for each in _told(divisions, _DEARER * step_macs) if each.tiling)


def _told(divisions: Sequence[Division], dearer: float) -> list[Division]:
    """Without those after which others need less and cost hardly more."""
    told = list(divisions[-1:])
    for division in reversed(divisions):
        if division.extra_macs < told[-1].extra_macs - dearer:
            told.append(division)
    return told[::-1]


def _divisions(pieces: Sequence[Sequence[JoinedStages]], standing_bytes: int) -> Iterator[Division]:
    """The cheapest under each of falling limits: clearly lower ones, and where none is met, any lower one."""
    division = _cheapest(pieces, inf)
    while division is not None:
        yield division
        peak = division.peak_bytes
        clearly_lower = peak - max(1, _LOWER * (peak - standing_bytes))  # a peak may be below what stands
        division = _cheapest(pieces, clearly_lower) or _cheapest(pieces, peak - 1)


def _cheapest(pieces: Sequence[Sequence[JoinedStages]], limit: float) -> Division | None:
    """By the cheapest divisions of the stages up to each; `pieces` are by their last stage."""
    best: list[Division | None] = [Division()]
    for ending in pieces:
        found: Division | None = None
        for piece in ending:
            before = best[len(best) - piece.stages]
            if before is None or piece.peak_bytes > limit:
                continue
            extra = before.extra_macs + piece.extra_macs
            if found is None or extra < found.extra_macs:
                found = Division((*before.pieces, piece), extra)
        best.append(found)
    return best[-1]


def _pieces(
    graph: Graph, need: BackwardFootprint, stages: Sequence[tuple[str, ...]], refusals: Refusals
) -> list[list[JoinedStages]]:
    """All pieces, by their last stage."""
    valley = {op: number for number, ops in enumerate(stages_of(graph, fall=0)) for op in ops}
    found = list[list[JoinedStages]]()
    for last in range(len(stages)):
        found.append([_untiled(need, stages[last])])
        for first in range(last, -1, -1):
            joined = tuple(op for stage in stages[first : last + 1] for op in stage)
            if valley[joined[-1]] - valley[joined[0]] >= _JOINED:
                break
            if first == last or _can_join(graph, joined):
                grids = _of_small_parts(graph, joined, refusals)
                found[-1] += _tiled(need, joined, grids, last - first + 1)
    return found


def _can_join(graph: Graph, ops: tuple[str, ...]) -> bool:
    """Whether stages can be one segment: not with barriers, nor with norms, which repeat the ops before."""
    chosen = set(ops)
    inside = [op for op in graph.ops if op.id in chosen]
    if any(is_barrier(graph, op) for op in inside):
        return False
    takers = (statistic_of(site_of(graph, op)) for op in inside)
    return bool(ops) and not any(taken and taken.partial is Partial.MOMENTS for taken in takers)


def _untiled(need: BackwardFootprint, stage: Sequence[str]) -> JoinedStages:
    """The memory of its most demanding op; everything else can be recomputed."""
    return JoinedStages(1, None, max(need.beside([op]) + need.kernels([op]) for op in stage), 0)


def _tiled(
    need: BackwardFootprint, ops: tuple[str, ...], grids: Sequence[Tiled], stages: int
) -> Iterator[JoinedStages]:
    beside = need.beside(ops)
    for tiled in grids:
        inside = tiled.costs.backward_peak_bytes + need.kernels(ops, tiled.costs.tiles)
        peak = beside + inside
        yield JoinedStages(stages, tiled, peak, extra_macs_of(tiled.segment, tiled.costs))


def _of_small_parts(graph: Graph, ops: tuple[str, ...], refusals: Refusals) -> list[Tiled]:
    """The grids that are worth a look, without those of slow large parts if there are any finer."""
    tried = takewhile(lambda tiled: prod(tiled.parts) <= _FINEST, grids_tried(graph, ops, refusals))
    cut = [tiled for tiled in tried if prod(tiled.parts) > 1]
    return [tiled for tiled in cut if tiled.costs.part_bytes <= _PART] or cut[-1:]
