"""Tilings whose sweeps rematerialise inputs: which tensors sweeps keep for each other's backward.

At first every input of a sweep is kept. At the peak, while some sweep runs or is differentiated, other kept
tensors wait as well. One after the other of these is dropped and recomputed by its readers, always the one
that frees the most bytes per unit of work. Each step needs less memory and more work.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from stowplan.ir import Graph, Kind
from stowplan.ops.effects import macs_of
from stowplan.ops.table import site_of
from stowplan.ops.windows import windows_of
from stowplan.plan.select import Refusals
from stowplan.techniques.tiles.plan.borders import stretches_between_narrow_norms
from stowplan.techniques.tiles.plan.buffer_reuse import buffers_reused
from stowplan.techniques.tiles.plan.candidates import Tiled, Tiling, evenly_tiled
from stowplan.techniques.tiles.plan.products import is_product
from stowplan.techniques.tiles.plan.rematerialise import PlannedSweep, RematerialisedInputs, rematerialise
from stowplan.techniques.tiles.plan.rounds import rounds_of

_LIMITS = (1.6, 1.35, 1.15, 1.05, 1.0)  # of the least that sweeps can do with
_NEAR = 10  # sweeps, about a stage
_HALO = 2.0  # factor on the price of a tensor with a halo: neighbouring tiles compute parts of it as well
_MOST = 0.75  # of the memory inside all stages

Names = frozenset[str]
Rematerialised = Mapping[Tiled, RematerialisedInputs]


def rematerialised_tilings(graph: Graph, refusals: Refusals) -> Iterator[tuple[Tiling, Rematerialised]]:
    """Tilings between narrow norms, of most stages and of all; the finest also with rematerialised inputs."""
    stretches = stretches_between_narrow_norms(graph)
    if len(stretches) > 1:
        coarse, fine = evenly_tiled(graph, stretches, refusals)
        for tiling in filter(None, (_first_stages(coarse), coarse, fine)):
            yield tiling, {}
        if fine:
            yield from ((fine, remats) for remats in Chain(fine).choices())


def _first_stages(tiling: Tiling) -> Tiling:
    """The first stages that together hold the share `_MOST` of the memory inside all stages."""
    held = list(accumulate(_bytes_of(each.segment.graph, each.segment.inside) for each in tiling))
    return tiling[: sum(so_far < _MOST * held[-1] for so_far in held) + 1]


@dataclass(frozen=True, slots=True)
class RecomputedInputs:
    """What a sweep recomputes from its `sources`: in parts, or whole if several passes read it."""

    sources: Names
    in_parts_macs: int
    whole_macs: int
    whole: Names


@dataclass(frozen=True, slots=True)
class TilingState:
    """The tensors kept for all sweeps, the work of recomputing the others, and the memory of each sweep."""

    kept: Names
    macs: int
    needs: tuple[int, ...]  # bytes of each sweep, backward and forward
    waiting: tuple[Names, ...]  # kept tensors that only wait meanwhile

    @property
    def worst(self) -> int:
        return max(range(len(self.needs)), key=self.needs.__getitem__)


class Chain:
    """The sweeps of a tiling in their order, and the tensors between them."""

    def __init__(self, tiling: Tiling) -> None:
        self._tiling = tiling
        self._sweeps = [PlannedSweep(t.segment, rounds_of(t.segment, t.parts)) for t in tiling]
        segments = [sweep.segment for sweep in self._sweeps]
        self._graph = segments[0].graph
        self._tensors = self._graph.tensors
        self._read = [self._activations(segment.inputs) for segment in segments]
        self._made = [self._activations(segment.outputs) for segment in segments]
        self._before = _unions([frozenset(), *self._made])
        self._ops = {name: op for segment in segments for op in segment.ops for name in op.writes()}
        self._macs = {op.id: macs_of(site_of(self._graph, op)) for op in self._ops.values()}
        self._bare = self._of_nothing()
        self._shared = [self._bytes(buffers_reused(sweep.rounds[-1])) for sweep in self._sweeps]
        self._beside = [self._beside_bytes(place) for place in range(len(tiling))]
        self._known: dict[tuple[int, Names], RecomputedInputs] = {}

    def choices(self) -> Iterator[Rematerialised]:
        """Choices that keep less and less: first if all kept tensors wait, then only those for sweeps nearby.

        The planner of the step may drop tensors that are kept for other sweeps, and recompute those sweeps.
        """
        given = list[Rematerialised]()
        for near in (len(self._tiling), _NEAR):
            states = list(self._states(near))
            least = min(max(state.needs) for state in states)
            for limit in _LIMITS:
                state = next(state for state in states if max(state.needs) <= limit * least)
                remats = self._remats(state, round(limit * least))
                if remats and remats not in given:
                    given.append(remats)
                    yield remats

    @property
    def _places(self) -> range:
        return range(len(self._tiling))

    def _states(self, near: int) -> Iterator[TilingState]:
        """States from every input kept to the fewest possible; tensors without a halo are dropped first."""
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
        """Whether a tensor is recomputed from kept tensors without a halo, position by position."""
        made = self._makers(name, kept)[0]
        ops = [op for op in self._ops.values() if op.id in made]
        windowed = [op for op in ops if op.type in windows_of]
        return all(is_product(self._graph, op) for op in windowed)

    def _state(self, kept: Names, near: int) -> TilingState:
        """While a sweep is differentiated, the tensors kept for the `near` sweeps before it are in memory."""
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
        return TilingState(kept, sum(each.whole_macs for each in again), tuple(needs), tuple(held))

    def _again(self, place: int, kept: Names) -> RecomputedInputs:
        if (place, kept) not in self._known:
            self._known[place, kept] = self._recomputed(place, kept)
        return self._known[place, kept]

    def _recomputed(self, place: int, kept: Names) -> RecomputedInputs:
        missing = {name: self._makers(name, kept) for name in self._read[place] - kept}
        made = {name: found for name, found in missing.items() if self._bare.isdisjoint(found[1])}
        early = self._sweeps[place].read_early.intersection(made)
        late = made.keys() - early
        return RecomputedInputs(
            self._read[place].difference(made).union(*(read for _, read in made.values())),
            in_parts_macs=self._rounds(place, made) * self._macs_of(made, made),
            whole_macs=self._macs_of(made, early) + self._rounds(place, late) * self._macs_of(made, late),
            whole=early,
        )

    def _makers(self, wanted: str, kept: Names) -> tuple[Names, Names]:
        """The ops that compute a tensor from kept tensors, and the kept tensors that they read."""
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
        """The number of passes that read any of these tensors."""
        rounds = self._sweeps[place].rounds
        return sum(not set(names).isdisjoint(each.segment.inputs) for each in rounds)

    def _remats(self, state: TilingState, limit: int) -> Rematerialised:
        remats = dict[Tiled, RematerialisedInputs]()
        for place, reader in enumerate(self._sweeps):
            again = self._again(place, state.kept & self._before[place])
            has_room = state.needs[2 * place] + self._bytes(again.whole) <= limit
            whole = again.whole if has_room else frozenset[str]()
            remat = rematerialise(self._sweeps[:place], reader, again.sources, whole)
            if remat is not None:
                remats[self._tiling[place]] = remat
        return remats

    def _beside_bytes(self, place: int) -> int:
        """The bytes of the gradients around a sweep and of tensors that bypass it, and of a tile."""
        passing = _passing(self._tiling, place)
        gradients = self._bytes(self._read[place]) + self._bytes(self._made[place] | passing)
        return gradients - self._shared[place] + self._tiling[place].costs.backward_peak_bytes

    def _of_nothing(self) -> Names:
        """Tensors computed from no activation and without norms: they can be recomputed at any time."""
        made = zip(self._sweeps, self._read, self._made, strict=True)
        return frozenset(n for sweep, read, of in made if not read and not sweep.statistics for n in of)

    def _activations(self, names: Iterable[str]) -> Names:
        return frozenset(name for name in names if self._tensors[name].kind is Kind.ACTIVATION)

    def _bytes(self, names: Iterable[str]) -> int:
        return _bytes_of(self._graph, names)


def _price(state: TilingState, other: TilingState) -> float:
    """The work per byte that another state, which keeps less, frees at the peak."""
    freed = state.needs[state.worst] - other.needs[state.worst]
    return (other.macs - state.macs) / freed if freed > 0 else inf


def _unions(names: Iterable[Names]) -> list[Names]:
    """The unions of the first, of the first two, and so on."""
    return list(accumulate(names, lambda so_far, more: so_far | more))


def _passing(tiling: Tiling, place: int) -> set[str]:
    """Tensors from sweeps before this one to sweeps after it: their gradients wait meanwhile."""
    made = {name for tiled in tiling[:place] for name in tiled.segment.outputs}
    read = {name for tiled in tiling[place + 1 :] for name in tiled.segment.inputs}
    return (made & read).difference(tiling[place].segment.inputs)


def _bytes_of(graph: Graph, names: Iterable[str]) -> int:
    """The bytes of activations; everything else is in memory in any case."""
    tensors = (graph.tensors[name] for name in names)
    return sum(tensor.nbytes or 0 for tensor in tensors if tensor.kind is Kind.ACTIVATION)
