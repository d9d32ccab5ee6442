"""What sweeps keep for each other, and which of them make what they read again, as streams.

At first all that a sweep reads is kept. Where most is needed, while some sweep is run or differentiated,
other things wait as well: of these one after the other is made again by whoever reads it, always the one that
frees most for the least work. So less and less is needed, for more and more work.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from stowplan.ir import Graph, Kind
from stowplan.ops.macs import macs_of
from stowplan.ops.table import site_of
from stowplan.ops.windows import windows_of
from stowplan.plan.candidate import Refusals
from stowplan.plan.tiles.borders import stretches_between_narrow_norms
from stowplan.plan.tiles.candidates import Tiled, Tiling, evenly_tiled
from stowplan.plan.tiles.products import is_product
from stowplan.plan.tiles.rounds import rounds_of
from stowplan.plan.tiles.streams import Stream, Swept, stream_from
from stowplan.plan.tiles.succession import successors

_LIMITS = (1.6, 1.35, 1.15, 1.05, 1.0)  # of the least that sweeps can do with
_NEAR = 10  # sweeps, about a stage
_HALO = 2.0  # times the price of what is made with a halo: others will have to make it as well
_MOST = 0.75  # of what all stages hold inside

Names = frozenset[str]
Streams = Mapping[Tiled, Stream]


def streamed_tilings(graph: Graph, refusals: Refusals) -> Iterator[tuple[Tiling, Streams]]:
    """Tilings between narrow norms, of most of the network and of all, the finest also with streams."""
    stretches = stretches_between_narrow_norms(graph)
    if len(stretches) > 1:
        coarse, fine = evenly_tiled(graph, stretches, refusals)
        for tiling in filter(None, (_first_stages(coarse), coarse, fine)):
            yield tiling, {}
        if fine:
            yield from ((fine, streams) for streams in Chain(fine).choices())


def _first_stages(tiling: Tiling) -> Tiling:
    """Those that hold most of what all hold inside."""
    held = list(accumulate(_bytes_of(each.segment.graph, each.segment.inside) for each in tiling))
    return tiling[: sum(so_far < _MOST * held[-1] for so_far in held) + 1]


@dataclass(frozen=True, slots=True)
class RecomputedInputs:
    """What a sweep makes again of its `sources`: in parts, or whole where several rounds read it."""

    sources: Names
    in_parts_macs: int
    whole_macs: int
    whole: Names


@dataclass(frozen=True, slots=True)
class State:
    """What is kept for all sweeps, the work that this costs, and where most is needed: what waits there."""

    kept: Names
    macs: int
    needs: tuple[int, ...]  # of each sweep, backward and forward
    waiting: tuple[Names, ...]

    @property
    def worst(self) -> int:
        return max(range(len(self.needs)), key=self.needs.__getitem__)


class Chain:
    """The sweeps of a tiling, one after the other, and what they hand on."""

    def __init__(self, tiling: Tiling) -> None:
        self._tiling = tiling
        self._swept = [Swept(t.segment, rounds_of(t.segment, t.parts)) for t in tiling]
        segments = [swept.segment for swept in self._swept]
        self._graph = segments[0].graph
        self._tensors = self._graph.tensors
        self._read = [self._activations(segment.inputs) for segment in segments]
        self._made = [self._activations(segment.outputs) for segment in segments]
        self._before = _unions([frozenset(), *self._made])
        self._ops = {name: op for segment in segments for op in segment.ops for name in op.writes()}
        self._macs = {op.id: macs_of(site_of(self._graph, op)) for op in self._ops.values()}
        self._bare = self._of_nothing()
        self._shared = [self._bytes(successors(swept.rounds[-1])) for swept in self._swept]
        self._beside = [self._beside_bytes(place) for place in range(len(tiling))]
        self._known: dict[tuple[int, Names], RecomputedInputs] = {}

    def choices(self) -> Iterator[Streams]:
        """With less and less kept, first if all of it waits, then if only what is for sweeps that are near.

        What is kept for others may be dropped meanwhile, and made again by running sweeps once more: that is
        for whoever plans the step.
        """
        told = list[Streams]()
        for near in (len(self._tiling), _NEAR):
            states = list(self._states(near))
            least = min(max(state.needs) for state in states)
            for limit in _LIMITS:
                state = next(state for state in states if max(state.needs) <= limit * least)
                streams = self._streams(state, round(limit * least))
                if streams and streams not in told:
                    told.append(streams)
                    yield streams

    @property
    def _places(self) -> range:
        return range(len(self._tiling))

    def _states(self, near: int) -> Iterator[State]:
        """From all kept that is read to where no more can be spared, rather what is made without a halo."""
        state = self._state(frozenset[str]().union(*self._read), near)
        light = frozenset(name for name in state.kept if self._is_light(name, state.kept))
        while True:
            yield state
            spared = state.waiting[state.worst] & state.kept
            tried = [self._state(state.kept - {name}, near) for name in sorted(spared)]
            prices = {other.kept: _price(state, other) for other in tried}
            heavy = (other.kept for other in tried if light.isdisjoint(state.kept - other.kept))
            prices |= {kept: _HALO * prices[kept] for kept in heavy}
            state = min(tried, key=lambda other: prices[other.kept], default=state)
            if prices.get(state.kept, inf) == inf:
                return

    def _is_light(self, name: str, kept: Names) -> bool:
        """Whether something is made again of what is kept place by place."""
        made = self._makers(name, kept)[0]
        ops = [op for op in self._ops.values() if op.id in made]
        windowed = [op for op in ops if op.type in windows_of]
        return all(is_product(self._graph, op) for op in windowed)

    def _state(self, kept: Names, near: int) -> State:
        """`near` is how many sweeps before one things wait for while it is differentiated."""
        again = [self._again(place, kept & self._before[place]) for place in self._places]
        lasting = [each.sources - self._bare for each in again]
        ahead = frozenset[str]().union(*lasting) if near >= len(again) else frozenset[str]()
        needs, held = list[int](), list[Names]()
        for place, each in enumerate(again):
            waiting = frozenset[str]().union(*lasting[max(0, place + 1 - near) : place + 1])
            before = ahead & self._before[place]
            run = self._bytes(before | self._read[place] | self._made[place]) - self._shared[place]
            needs.append(self._bytes(waiting | each.sources) + self._beside[place])
            needs.append(run + self._tiling[place].costs.forward_peak_bytes)
            held += [waiting, before]
        return State(kept, sum(each.whole_macs for each in again), tuple(needs), tuple(held))

    def _again(self, place: int, kept: Names) -> RecomputedInputs:
        if (place, kept) not in self._known:
            self._known[place, kept] = self._recomputed(place, kept)
        return self._known[place, kept]

    def _recomputed(self, place: int, kept: Names) -> RecomputedInputs:
        missing = {name: self._makers(name, kept) for name in self._read[place] - kept}
        made = {name: found for name, found in missing.items() if self._bare.isdisjoint(found[1])}
        early = self._swept[place].read_early.intersection(made)
        late = made.keys() - early
        return RecomputedInputs(
            self._read[place].difference(made).union(*(read for _, read in made.values())),
            in_parts_macs=self._rounds(place, made) * self._macs_of(made, made),
            whole_macs=self._macs_of(made, early) + self._rounds(place, late) * self._macs_of(made, late),
            whole=early,
        )

    def _makers(self, wanted: str, kept: Names) -> tuple[Names, Names]:
        """The ops that make something of what is kept, and what they read of that."""
        ops, read, open_names = set[str](), set[str](), [wanted]
        while open_names:
            name = open_names.pop()
            op = self._ops.get(name)
            if op is None or (name in kept and name != wanted):
                read.add(name)
            elif op.id not in ops:
                ops.add(op.id)
                open_names += self._activations(op.reads())
        return frozenset(ops), frozenset(read)

    def _macs_of(self, made: Mapping[str, tuple[Names, Names]], names: Iterable[str]) -> int:
        return sum(self._macs[op] for op in frozenset().union(*(made[name][0] for name in names)))

    def _rounds(self, place: int, names: Iterable[str]) -> int:
        """That read any of these."""
        rounds = self._swept[place].rounds
        return sum(not set(names).isdisjoint(each.segment.inputs) for each in rounds)

    def _streams(self, state: State, limit: int) -> Streams:
        streams = dict[Tiled, Stream]()
        for place, reader in enumerate(self._swept):
            again = self._again(place, state.kept & self._before[place])
            has_room = state.needs[2 * place] + self._bytes(again.whole) <= limit
            whole = again.whole if has_room else frozenset[str]()
            stream = stream_from(self._swept[:place], reader, again.sources, whole)
            if stream is not None:
                streams[self._tiling[place]] = stream
        return streams

    def _beside_bytes(self, place: int) -> int:
        """Of gradients on both sides of a sweep and of what passes by, and of a tile."""
        passing = _passing(self._tiling, place)
        gradients = self._bytes(self._read[place]) + self._bytes(self._made[place] | passing)
        return gradients - self._shared[place] + self._tiling[place].costs.backward_peak_bytes

    def _of_nothing(self) -> Names:
        """What is made of no activation, without norms: it need not wait, and can be made again any time."""
        made = zip(self._swept, self._read, self._made, strict=True)
        return frozenset(n for swept, read, of in made if not read and not swept.statistics for n in of)

    def _activations(self, names: Iterable[str]) -> Names:
        return frozenset(name for name in names if self._tensors[name].kind is Kind.ACTIVATION)

    def _bytes(self, names: Iterable[str]) -> int:
        return _bytes_of(self._graph, names)


def _price(state: State, other: State) -> float:
    """The work for a byte less, where most is needed, in another state that keeps less."""
    freed = state.needs[state.worst] - other.needs[state.worst]
    return (other.macs - state.macs) / freed if freed > 0 else inf


def _unions(names: Iterable[Names]) -> list[Names]:
    """Of the first, of the first two, and so on."""
    return list(accumulate(names, lambda so_far, more: so_far | more))


def _passing(tiling: Tiling, place: int) -> set[str]:
    """What sweeps before one hand to those behind it: gradients of it wait meanwhile."""
    made = {name for tiled in tiling[:place] for name in tiled.segment.outputs}
    read = {name for tiled in tiling[place + 1 :] for name in tiled.segment.inputs}
    return (made & read).difference(tiling[place].segment.inputs)


def _bytes_of(graph: Graph, names: Iterable[str]) -> int:
    """Of activations: all else is there anyway."""
    tensors = (graph.tensors[name] for name in names)
    return sum(tensor.nbytes or 0 for tensor in tensors if tensor.kind is Kind.ACTIVATION)
