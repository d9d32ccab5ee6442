"""How a run used memory: which addresses its tensors sat at, and whether any two got in each other's way."""

from bisect import bisect_left
from dataclasses import dataclass
from heapq import heappop, heappush

from stowplan.analyse.liveness import Liveness
from stowplan.ir import Allocation, Graph, Kind


@dataclass(frozen=True, slots=True)
class Addresses:
    """The places of a run's tensors, constants left out.

    `overlaps` are pairs of tensors that shared bytes while both lived, though neither is a view of the other;
    `views` are those that did so because one is.
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
    """What the addresses of a run say, under the lifetimes of its graph."""
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
    """Pairs that hold a byte at the same time; where several crowd on one spot, at least the neighbours."""
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
