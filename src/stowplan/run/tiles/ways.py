"""Ways to run a captured step: as it is, or captured once more with stretches of it swept tile by tile."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from math import inf
from typing import Protocol

from torch import nn
from torch._ops import OpOverload

from stowplan.capture import Captured
from stowplan.errors import NotTileable
from stowplan.ir import Graph, Kind, Op, Phase, Tensor
from stowplan.plan.candidate import GraphWay, Offer, PlainStep, Sweeps, Way, search_moves
from stowplan.plan.decision import Decision
from stowplan.plan.plan import Plan
from stowplan.plan.pricing import Basis, Pricing
from stowplan.plan.tile_map import TileMap, tiled_inside
from stowplan.plan.tiles.borders import in_tiling_order
from stowplan.plan.tiles.candidates import Tiled, Tiling, stage_tilings, whole_tilings
from stowplan.plan.tiles.collapse import extra_macs_of
from stowplan.plan.tiles.costs import SweepCosts
from stowplan.plan.tiles.joins import divided_tilings
from stowplan.plan.tiles.mapping import tile_map_of
from stowplan.plan.tiles.streaming import Streams, streamed_tilings
from stowplan.plan.tiles.streams import Stream
from stowplan.plan.untiled import WHOLE_STEP, Untiled, stretch_named
from stowplan.run.cost.probe import Progress
from stowplan.run.planning.price import plan_within, price_captured
from stowplan.run.tiles.knee import Sweeping
from stowplan.run.tiles.remade import with_skips_again
from stowplan.run.tiles.streamed import Streamed, streamed_sweeps, with_streams
from stowplan.run.tiles.sweep import Sweep
from stowplan.run.tiles.swept import Otherwise, capture_swept, check_differentiable

_GATHER, _SWEEP = "stowplan.gather.default", "stowplan.sweep.default"
_SWEEPS = (_SWEEP, "stowplan.sweep_loss.default")
_SURE = 0.75  # of the memory of a tile that is differentiated, as projected


@dataclass(frozen=True, slots=True)
class Subject:
    """A captured step and what it was captured of. Some of its calls may be run `otherwise`."""

    captured: Captured
    model: nn.Module
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    otherwise: Mapping[OpOverload, Otherwise] = field(default_factory=dict)

    def as_run(self, graph: Graph, sweeps: Sequence[Sweep] = ()) -> Captured:
        """The step in the order of a graph, with sweeps."""
        ordered = replace(self.captured, graph=graph)
        return capture_swept(
            ordered, self.model, self.args, self.kwargs, sweeps=sweeps, otherwise=self.otherwise
        )


@dataclass(frozen=True, slots=True)
class Search:
    """How plans are searched for."""

    allow: frozenset[str]
    moves: int | None = None
    progress: Progress | None = None


class StepWay(Way, Protocol):
    """A way that can be run."""

    @property
    def captured(self) -> Captured:
        """The step that its plans are for."""


class CapturedWay(GraphWay):
    """A step whose ops have been tried. Its plans are verified and leave room for the draws they replay."""

    def __init__(
        self,
        captured: Captured,
        pricing: Pricing,
        step: PlainStep,
        search: Search,
        sweeps: Sweeps | None = None,
    ) -> None:
        super().__init__(captured.graph, pricing, step, allow=search.allow, sweeps=sweeps, moves=search.moves)
        self.captured = captured

    def plan(self, allowed_bytes: int) -> Plan:
        return self.told(plan_within(self.planner, allowed_bytes))


class SweptWay:
    """Some stretches in sweeps. It is captured for its memory, and tried for its time and its plans."""

    def __init__(
        self,
        subject: Subject,
        tiling: Tiling,
        streams: Streams,
        sweeping: Sweeping,
        step: PlainStep,
        search: Search,
    ) -> None:
        self._subject, self._tiling, self._step, self._search = subject, tiling, step, search
        self._streams, self._sweeping = streams, sweeping

    @property
    def stretches(self) -> tuple[str, ...]:
        return tuple(stretch_named(tiled.segment.ops) for tiled in self._tiling)

    def bounds(self, allowed_bytes: int) -> Iterator[float]:
        """By the work of its sweeps; by their trials, if memory can do; as captured with them."""
        if self._surely_there_bytes > allowed_bytes:
            yield inf
            return
        streamed = sum(map(self._sweeping.hoped_seconds, self._streams.values()))
        hoped = sum(map(self._sweeping.hoped_extra_seconds, self._tiling))
        yield self._step.seconds + hoped + streamed
        if self.floor_bytes > allowed_bytes:
            yield inf
            return
        yield self._step.seconds + sum(map(self._sweeping.extra_seconds, self._tiling)) + streamed
        yield self._tried.least_seconds(allowed_bytes)

    @cached_property
    def _surely_there_bytes(self) -> int:
        """While a tile is differentiated: parameters, what the sweep reads, sums of gradients, the tile."""
        tensors = self._subject.captured.graph.tensors
        parameters = _bytes_of(tensors.values(), Kind.PARAMETER)
        return parameters + max(_beside_parameters(t, self._streams.get(t)) for t in self._tiling)

    @cached_property
    def floor_bytes(self) -> int:
        """What the graph needs if tiles take little more than they hold."""
        costs = {s.name: t.costs for s, t in zip(self._sweeps, self._tiling, strict=True)}
        costs |= {streamed.sweep.name: costs[name] for name, streamed in self._streamed.items()}
        ops = self.captured.graph.ops
        swept = {op.id: costs.get(str(op.attributes.get("name"))) for op in ops}
        workspace = {op.id: _workspace(op, found) for op in ops if (found := swept[op.id])}
        pricing = Pricing({op.id: 0.0 for op in ops}, Basis.MEASURED, workspace)
        return GraphWay(self.captured.graph, pricing, self._step, allow=()).floor_bytes

    def plan(self, allowed_bytes: int) -> Plan:
        return self._tried.plan(allowed_bytes)

    def offers(self) -> Iterable[Offer]:
        return self._tried.offers()

    @cached_property
    def _sweeps(self) -> tuple[Sweep, ...]:
        return tuple(map(self._sweeping.sweep, self._tiling))

    @cached_property
    def _streamed(self) -> dict[str, Streamed]:
        """By the names of sweeps, how those with a stream are differentiated."""
        pairs = zip(self._tiling, self._sweeps, strict=True)
        streams = {sweep.name: self._streams[tiled] for tiled, sweep in pairs if tiled in self._streams}
        return streamed_sweeps(self._sweeps, streams, self._subject.captured.program.calls)

    @cached_property
    def captured(self) -> Captured:
        swept = self._subject.as_run(self._subject.captured.graph, self._sweeps)
        return with_streams(swept, self._sweeps, self._streamed)

    @cached_property
    def _tried(self) -> CapturedWay:
        pricing = price_captured(self.captured, self._search.progress, self._search.allow)
        search = replace(self._search, moves=self._search.moves or search_moves(self.captured.graph))
        return CapturedWay(self.captured, pricing, self._step, search, self._decided())

    def _decided(self) -> Sweeps:
        decisions: dict[str, Decision] = {}
        for sweep, tiled in zip(self._ops(), self._tiling, strict=True):
            decisions |= tiled_inside(sweep, tiled.parts, tiled.segment.inside)
        extra = sum(map(self._extra_macs, self._tiling))
        macs = {op: t.costs.again_macs for op, t in zip(self._ops(), self._tiling, strict=True)}
        return Sweeps(decisions, extra, self._maps, macs)

    def _maps(self) -> tuple[TileMap, ...]:
        return tuple(
            tile_map_of(
                tiled.segment,
                tiled.parts,
                tiled.costs,
                sweep=sweep,
                extra_macs=self._extra_macs(tiled),
                stream=self._streams.get(tiled),
            )
            for sweep, tiled in zip(self._ops(), self._tiling, strict=True)
        )

    def _extra_macs(self, tiled: Tiled) -> int:
        stream = self._streams.get(tiled)
        return extra_macs_of(tiled.segment, tiled.costs) + (stream.macs if stream else 0)

    def _ops(self) -> list[str]:
        """The ops that the sweeps have become."""
        forward = [op for op in self.captured.graph.ops if op.phase is Phase.FORWARD and op.type in _SWEEPS]
        named = {str(op.attributes.get("name")): op.id for op in forward}
        return [named[sweep.name] for sweep in self._sweeps]


def _workspace(sweep: Op, costs: SweepCosts) -> int:
    """The memory of a tile, not overestimated: of what backward would hold some may be spared."""
    ahead = {_GATHER: costs.gathering_peak_bytes, _SWEEP: costs.forward_peak_bytes}
    return ahead.get(sweep.type, _differentiated_bytes(costs))


def _differentiated_bytes(costs: SweepCosts) -> int:
    return max(costs.forward_peak_bytes, round(_SURE * costs.backward_peak_bytes))


def _beside_parameters(tiled: Tiled, stream: Stream | None) -> int:
    """Bytes of what a sweep reads, of the gradients that it makes, and of a tile."""
    segment = tiled.segment
    tensors = segment.graph.tensors
    read = [tensors[name] for name in (stream.read if stream else segment.inputs)]
    differentiated = {t.gradient_of for t in tensors.values()}
    sums = [tensors[name] for name in segment.inputs if name in differentiated]
    return _bytes_of(read, Kind.ACTIVATION) + _bytes_of(sums, *Kind) + _differentiated_bytes(tiled.costs)


def _bytes_of(tensors: Iterable[Tensor], *kinds: Kind) -> int:
    return sum(t.nbytes or 0 for t in tensors if t.kind in kinds and t.alias_of is None)


def ways_of(
    subject: Subject, pricing: Pricing | None, step: PlainStep, search: Search, untiled: Untiled
) -> Iterator[StepWay]:
    """All ways to tile a step; none if autograd would not do what the step does.

    `pricing` is that of its ops, which are tried first if there is none.
    """
    if "tile" not in search.allow:
        return
    try:
        refuse_untileable(subject)
    except NotTileable as refusal:
        untiled.add(WHOLE_STEP, refusal)
        return
    pricing = pricing or price_captured(subject.captured, search.progress, search.allow)
    yield from _swept_ways(subject, pricing, step, search, partial(_tilings, untiled=untiled))
    for captured in with_skips_again(subject.captured, subject.model, subject.args, subject.kwargs):
        pricing = price_captured(captured, search.progress, search.allow)
        again, divided = replace(subject, captured=captured), partial(_divided, untiled=untiled)
        yield from _swept_ways(again, pricing, step, search, divided)


def _tilings(graph: Graph, untiled: Untiled) -> Iterator[tuple[Tiling, Streams]]:
    whole = ((tiled,) for tiled in whole_tilings(graph, untiled))
    for tiling in chain(stage_tilings(graph, untiled), divided_tilings(graph, untiled), whole):
        yield tiling, {}
    yield from streamed_tilings(graph, untiled)


def _divided(graph: Graph, untiled: Untiled) -> Iterator[tuple[Tiling, Streams]]:
    return ((tiling, {}) for tiling in divided_tilings(graph, untiled))


def _swept_ways(
    subject: Subject,
    pricing: Pricing,
    step: PlainStep,
    search: Search,
    tilings_of: Callable[[Graph], Iterable[tuple[Tiling, Streams]]],
) -> Iterator[StepWay]:
    """A way for each tiling of the step, brought into the order that suits tiles."""
    early = replace(subject.captured, graph=in_tiling_order(subject.captured.graph))
    sweeping = Sweeping(early.graph, early.program.calls, pricing, search.progress)
    for tiling, streams in tilings_of(early.graph):
        yield SweptWay(replace(subject, captured=early), tiling, streams, sweeping, step, search)


def refuse_untileable(subject: Subject) -> None:
    """NotTileable says why, if no part of the step can be computed in tiles."""
    if _has_foreign_parameters(subject):
        raise NotTileable("the loss has parameters of its own")
    check_differentiable(subject.captured, subject.model, subject.args, subject.kwargs)


def _has_foreign_parameters(subject: Subject) -> bool:
    """Whether a loss brings tensors of its own, which the model as captured once more does not have."""
    program, model = subject.captured.program, subject.model
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    named = (*program.parameters.values(), *program.buffers.values())
    return any(names[0] not in known for names in named)
