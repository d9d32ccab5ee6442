"""Inspection: all facts about one document that need no run.

They are the facts of the graph, its packing, the times and addresses of a recorded run, the cost of tiles,
and the peak without layout changes.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from stowplan.analyse.facts import Facts, Liveness, facts_of, liveness_of, memory_curve
from stowplan.analyse.layouts import without_layout
from stowplan.analyse.packing import PackedBlock, Packing, pack
from stowplan.analyse.tile_costs import TileCosts, tile_costs_of
from stowplan.ir import Allocation, Document, Graph, Interval, Kind, Phase, Profile, Role
from stowplan.ops.effects import aliasing_of
from stowplan.watch import tell_phase


@dataclass(frozen=True, slots=True)
class Addresses:
    """The places of a run's tensors, without constants.

    `overlaps` are pairs of tensors that shared bytes while both lived, though neither is a view of the other;
    `views` are pairs where one is.
    """

    tensors: int
    start_addresses: int
    touched_bytes: int
    overlaps: tuple[tuple[str, str], ...]
    views: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, order=True)
class _Place:
    """Bytes [address, end) that a tensor held from op `first` to op `last`."""

    address: int
    tensor: str
    end: int
    first: int
    last: int


def addresses_of(graph: Graph, allocation: Allocation, liveness: Liveness) -> Addresses:
    """The addresses of a run, under the lifetimes of its graph."""
    places = _places(graph, allocation, liveness)
    shared = _shared(places)
    number_of = liveness.storages.number_of
    views = tuple(pair for pair in shared if number_of[pair[0]] == number_of[pair[1]])
    return Addresses(
        tensors=len(places),
        start_addresses=len({place.address for place in places}),
        touched_bytes=_touched_bytes(places),
        overlaps=tuple(pair for pair in shared if pair not in views),
        views=views,
    )


def _places(graph: Graph, allocation: Allocation, liveness: Liveness) -> list[_Place]:
    places = []
    for name, (address, size) in allocation.places.items():
        tensor = graph.tensors.get(name)
        if tensor is not None and tensor.kind is not Kind.CONSTANT:
            number = liveness.storages.number_of[name]
            first, last = int(liveness.start[number]), int(liveness.end[number])
            places.append(_Place(address, name, address + size, first, last))
    return sorted(places)


def _touched_bytes(places: list[_Place]) -> int:
    touched = reach = 0
    for place in places:
        touched += max(0, place.end - max(place.address, reach))
        reach = max(reach, place.end)
    return touched


def _shared(places: list[_Place]) -> list[tuple[str, str]]:
    """Pairs that hold a byte at the same time; where several share one byte, at least the neighbours."""
    live: list[_Place] = []  # by address
    leaving: list[tuple[int, _Place]] = []
    pairs = []
    held = [place for place in places if place.address < place.end and place.first <= place.last]
    for place in sorted(held, key=lambda place: place.first):
        while leaving and leaving[0][0] < place.first:
            del live[bisect_left(live, heappop(leaving)[1])]
        index = bisect_left(live, place)
        beyond = bisect_left(live, place.end, key=lambda other: other.address)
        near = live[max(0, index - 1) : beyond]
        pairs += [(other.tensor, place.tensor) for other in near if place.address < other.end]
        live.insert(index, place)
        heappush(leaving, (place.last, place))
    return pairs


def blocks_of(graph: Graph, liveness: Liveness) -> tuple[PackedBlock, ...]:
    """A block per storage that exists, without constants, and one per op's temporary memory."""
    storages = zip(
        liveness.storages.owners,
        liveness.storages.nbytes.tolist(),
        liveness.start.tolist(),
        liveness.end.tolist(),
        strict=True,
    )
    aside = enumerate(liveness.temporary_bytes.tolist())
    return (
        *(
            PackedBlock(owner, nbytes, start, end)
            for owner, nbytes, start, end in storages
            if start <= end and graph.tensors[owner].kind is not Kind.CONSTANT
        ),
        *(PackedBlock(f"temporary of {graph.ops[i].id}", nbytes, i, i) for i, nbytes in aside if nbytes),
    )


@dataclass(frozen=True, slots=True)
class ClockTimes:
    """The times on one clock: from the first start to the last end, and kernel seconds, longest first."""

    span_seconds: float
    seconds_by_type: Mapping[str, float]
    seconds_by_op: Mapping[str, float]


def times_of(graph: Graph, profile: Profile) -> dict[str, ClockTimes]:
    """The times of each clock. Clocks need not be aligned, so they are not compared."""
    types = {op.id: op.type for op in graph.ops}
    return {clock: _clock_times(intervals, types) for clock, intervals in profile.clocks.items() if intervals}


def _clock_times(intervals: Mapping[str, Interval], types: Mapping[str, str]) -> ClockTimes:
    by_op = {op: interval.end_seconds - interval.kernel_seconds for op, interval in intervals.items()}
    by_type: dict[str, float] = defaultdict(float)
    for op, seconds in by_op.items():
        by_type[types.get(op, "?")] += seconds
    first = min(interval.start_seconds for interval in intervals.values())
    last = max(interval.end_seconds for interval in intervals.values())
    return ClockTimes(last - first, _longest_first(by_type), _longest_first(by_op))


def _longest_first(seconds: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


PACKED_UNASKED = 50_000  # storages


@dataclass(frozen=True, slots=True)
class Inspection:
    """A document, the facts of its graph, and the facts of its other facets.

    `in_place_peak_bytes` is the peak if ops overwrite inputs that die, where they can. A field is None if the
    document lacks the facet (or, for the peak without layout, if there are no layout ops).
    """

    document: Document
    facts: Facts
    made_bytes_by_phase: Mapping[Phase, int]
    in_place_peak_bytes: int
    without_layout_peak_bytes: int | None
    packing: Packing | None
    times: Mapping[str, ClockTimes]
    addresses: Addresses | None
    tile_costs: TileCosts | None


def inspection_of(document: Document, *, packed: bool | None = None) -> Inspection:
    """Analyse a document whose graph is legal and has all its bytes.

    Unless `packed` is given, tensors are packed into an arena only if that takes seconds at most.
    """
    tell_phase("analysing the graph")
    graph = document.graph
    facts = facts_of(graph)
    packed = len(facts.liveness.storages.owners) <= PACKED_UNASKED if packed is None else packed
    return Inspection(
        document,
        facts,
        made_bytes_by_phase=_made_bytes_by_phase(graph),
        in_place_peak_bytes=_in_place_peak_bytes(graph, facts),
        without_layout_peak_bytes=_without_layout_peak_bytes(graph),
        packing=pack(blocks_of(graph, facts.liveness)) if packed else None,
        times=times_of(graph, document.profile) if document.profile else {},
        addresses=addresses_of(graph, document.allocation, facts.liveness) if document.allocation else None,
        tile_costs=tile_costs_of(graph, document.tiles) if document.tiles else None,
    )


def _made_bytes_by_phase(graph: Graph) -> dict[Phase, int]:
    """The bytes of all tensors that the ops of a phase make, views left out."""
    made: dict[Phase, int] = {}
    for op in graph.ops:
        tensors = (graph.tensors[use.tensor] for use in op.outputs if use.role is Role.DATA)
        size = sum(tensor.nbytes or 0 for tensor in tensors if tensor.alias_of is None)
        made[op.phase] = made.get(op.phase, 0) + size
    return made


def _in_place_peak_bytes(graph: Graph, plain: Facts) -> int:
    if not any(op.type in aliasing_of for op in graph.ops):
        return plain.peak.bytes
    return _peak_bytes(graph, liveness_of(graph, in_place=True))


def _peak_bytes(graph: Graph, liveness: Liveness) -> int:
    return int(memory_curve(graph, liveness).max(initial=0))


def _without_layout_peak_bytes(graph: Graph) -> int | None:
    if not any(op.phase is Phase.LAYOUT for op in graph.ops):
        return None
    bypassed = without_layout(graph)
    return _peak_bytes(bypassed, liveness_of(bypassed))
