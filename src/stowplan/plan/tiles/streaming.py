"""Which sweeps of a tiling are worth a stream: those that need most, as cheaply as a limit allows."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from stowplan.ir import Graph, Kind
from stowplan.plan.tiles.borders import stretches_between_narrow_norms
from stowplan.plan.tiles.candidates import Tiled, Tiling, evenly_tiled
from stowplan.plan.tiles.rounds import rounds_of
from stowplan.plan.tiles.segment import Segment
from stowplan.plan.tiles.streams import Stream, Swept, stream_from
from stowplan.plan.tiles.succession import successors

_NARROW = 2  # times smaller than a sweep's largest input: what is so small may be whole
_LIMITS = (0.7, 0.35, 0.1)  # of the way from the least that the sweeps can need to what they need as they are
_MOST = 0.75  # of what all stages hold inside

Streams = Mapping[Tiled, Stream]


@dataclass(frozen=True, slots=True)
class Option:
    """A stream or none, and what is needed with it while the sweep is differentiated."""

    need_bytes: int
    stream: Stream | None = None

    @property
    def macs(self) -> int:
        return self.stream.macs if self.stream else 0


def streamed_tilings(graph: Graph) -> Iterator[tuple[Tiling, Streams]]:
    """Tilings between narrow norms, of most of the network and of all, without and with streams."""
    stretches = stretches_between_narrow_norms(graph)
    if len(stretches) > 1:
        streaming = Streaming()
        coarse, fine = evenly_tiled(graph, stretches)
        for tiling in filter(None, (_first_stages(coarse), coarse, fine)):
            yield tiling, {}
            yield from ((tiling, streams) for streams in streaming.choices(tiling))


def _first_stages(tiling: Tiling) -> Tiling:
    """Those that hold most of what all hold inside."""
    held = list(accumulate(_bytes_of(each.segment, each.segment.inside) for each in tiling))
    return tiling[: sum(so_far < _MOST * held[-1] for so_far in held) + 1]


class Streaming:
    """The streams of the tilings of one graph, which have sweeps in common."""

    def __init__(self) -> None:
        self._known: dict[Tiled, Swept] = {}

    def choices(self, tiling: Tiling) -> Iterator[Streams]:
        """Under lower and lower limits of what any sweep needs, the cheapest streams that keep to them."""
        options = {tiled: list(self._options(tiling, place)) for place, tiled in enumerate(tiling)}
        most = max(tried[0].need_bytes for tried in options.values())
        least = max(min(option.need_bytes for option in tried) for tried in options.values())
        told = list[Streams]()
        for share in _LIMITS:
            choice = _cheapest_within(options, least + share * (most - least))
            if choice and choice not in told:
                told.append(choice)
                yield choice

    def _options(self, tiling: Tiling, place: int) -> Iterator[Option]:
        """The sweep as it is, then with its inputs made of what is further and further back."""
        before, reader = tiling[:place], self._swept(tiling[place])
        segment = reader.segment
        beside = _bytes_of(segment, _passing(tiling, place))
        yield Option(beside + self._need_bytes(before, tiling[place], segment.inputs, segment.inputs))
        known = [self._swept(tiled) for tiled in before]
        largest = max((_bytes_of(segment, [name]) for name in segment.inputs), default=0)
        for least in (largest // _NARROW + 1, 1):
            for kept in _cuts(known, segment.inputs, least):
                for whole in ((), reader.read_early):
                    stream = stream_from(known, reader, kept, whole)
                    if stream is not None:
                        need = self._need_bytes(before, tiling[place], stream.read, stream.kept)
                        yield Option(beside + need, stream)

    def _need_bytes(self, before: Tiling, reader: Tiled, read: Iterable[str], kept: Iterable[str]) -> int:
        """While the sweep is differentiated, or before that, while what is kept for it is made again.

        What is kept stays, for others that are differentiated later are made of it as well.
        """
        segment, names = reader.segment, frozenset(kept)
        incoming = _bytes_of(segment, segment.outputs)
        there = (*names.union(read), *segment.inputs)
        ends = _bytes_of(segment, there) + incoming - self._shared_bytes(reader)
        makers = [tiled for tiled in before if not names.isdisjoint(tiled.segment.outputs)]
        again = max(map(self._made_bytes, makers), default=0)
        return max(ends + reader.costs.backward_peak_bytes, again + incoming)

    def _made_bytes(self, tiled: Tiled) -> int:
        segment = tiled.segment
        ends = _bytes_of(segment, (*segment.inputs, *segment.outputs)) - self._shared_bytes(tiled)
        return ends + tiled.costs.forward_peak_bytes

    def _shared_bytes(self, tiled: Tiled) -> int:
        """Of outputs that take the place of an input, as their gradients do the other way."""
        return _bytes_of(tiled.segment, successors(self._swept(tiled).rounds[-1]))

    def _swept(self, tiled: Tiled) -> Swept:
        if tiled not in self._known:
            self._known[tiled] = Swept(tiled.segment, rounds_of(tiled.segment, tiled.parts))
        return self._known[tiled]


def _cheapest_within(options: dict[Tiled, list[Option]], limit: float) -> Streams:
    """From the last sweep to the first, as they are differentiated; none keeps more than those before it did.

    What only a later one needs would have to wait while they run.
    """
    streams, kept = dict[Tiled, Stream](), frozenset[str]()
    for tiled, tried in reversed(options.items()):
        fitting = [option for option in tried if option.need_bytes <= limit]
        nested = [o for o in fitting if not kept or o.stream is None or kept.issuperset(o.stream.kept)]
        cheapest = min(nested or fitting, key=lambda option: option.macs)
        if cheapest.stream is not None:
            streams[tiled], kept = cheapest.stream, frozenset(cheapest.stream.kept)
    return streams


def _cuts(before: Sequence[Swept], read: Iterable[str], least: int) -> Iterator[frozenset[str]]:
    """What is kept when sweeps, from the last to the second, make what has so many bytes again."""
    kept = frozenset(read)
    for segment in (swept.segment for swept in reversed(before[1:])):
        made = {name for name in kept.intersection(segment.outputs) if _bytes_of(segment, [name]) >= least}
        if made:
            kept = kept - made | frozenset(segment.inputs)
            yield kept


def _passing(tiling: Tiling, place: int) -> set[str]:
    """What sweeps before one hand to those behind it: gradients of it wait meanwhile."""
    made = {name for tiled in tiling[:place] for name in tiled.segment.outputs}
    read = {name for tiled in tiling[place + 1 :] for name in tiled.segment.inputs}
    return (made & read).difference(tiling[place].segment.inputs)


def _bytes_of(segment: Segment, names: Iterable[str]) -> int:
    """Of activations: all else is there anyway."""
    tensors = (segment.graph.tensors[name] for name in names)
    return sum(tensor.nbytes or 0 for tensor in tensors if tensor.kind is Kind.ACTIVATION)
