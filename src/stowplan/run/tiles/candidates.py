"""Candidates for a captured step: captured once more, with segments of it computed tile by tile."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from math import inf

from stowplan.capture import Captured
from stowplan.errors import NotTileable
from stowplan.ir import Graph, Kind, Op, Phase, Tensor
from stowplan.plan.candidate import Baseline, GraphCandidate, Refusals, Tradeoff, tradeoffs_of
from stowplan.plan.decision import Decision
from stowplan.plan.options import PlanOptions
from stowplan.plan.plan import Exactness, Plan
from stowplan.plan.pricing import Basis, Pricing
from stowplan.plan.tile_map import TileMap, tiled_inside
from stowplan.plan.tiles.borders import in_tiling_order
from stowplan.plan.tiles.candidates import Tiled, Tiling, stage_tilings, whole_tilings
from stowplan.plan.tiles.collapse import extra_macs_of
from stowplan.plan.tiles.costs import SweepCosts
from stowplan.plan.tiles.joins import divided_tilings
from stowplan.plan.tiles.mapping import tile_map_of
from stowplan.plan.tiles.segment import WHOLE_STEP, stretch_named
from stowplan.plan.tiles.streaming import Streams, streamed_tilings
from stowplan.plan.tiles.streams import Stream
from stowplan.plan.tiles.sweeps import Sweeps, with_moves
from stowplan.run.planning.planner import STEP_CANDIDATES, CapturedCandidate, StepCandidate
from stowplan.run.planning.price import price_captured
from stowplan.run.planning.recapture import check_differentiable
from stowplan.run.planning.subject import Subject
from stowplan.run.tiles.knee import Sweeping
from stowplan.run.tiles.remade import with_skips_again
from stowplan.run.tiles.streamed import Streamed, streamed_sweeps, with_streams
from stowplan.run.tiles.sweep import Sweep
from stowplan.run.tiles.swept import capture_swept

_GATHER, _SWEEP = "stowplan.gather.default", "stowplan.sweep.default"
_SWEEPS = (_SWEEP, "stowplan.sweep_loss.default")
_SURE = 0.75  # of the memory of a tile that is differentiated, as projected


class TiledCandidate:
    """Some stretches in sweeps. It is captured for its memory, and tried for its time and its plans."""

    def __init__(
        self,
        subject: Subject,
        tiling: Tiling,
        streams: Streams,
        sweeping: Sweeping,
        step: Baseline,
        options: PlanOptions,
    ) -> None:
        self._subject, self._tiling, self._step, self._options = subject, tiling, step, options
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
        options = PlanOptions(allow=())
        return GraphCandidate(self.captured.graph, pricing, self._step, options).floor_bytes

    def plan(self, allowed_bytes: int) -> Plan:
        return self._decided.told(self._tried.plan(allowed_bytes), self._step)

    def tradeoffs(self) -> Iterable[Tradeoff]:
        return tradeoffs_of(self._tried.planner, Exactness.ROUNDING)

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
        swept = swept_subject(self._subject, self._sweeps)
        return with_streams(swept, self._sweeps, self._streamed)

    @cached_property
    def _tried(self) -> CapturedCandidate:
        pricing = price_captured(self.captured, self._options)
        options = with_moves(self._options, self.captured.graph)
        return CapturedCandidate(self.captured, pricing, self._step, options)

    @cached_property
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


@STEP_CANDIDATES.register("tile")
def tiled_candidates(
    subject: Subject, pricing: Pricing | None, step: Baseline, options: PlanOptions, refusals: Refusals
) -> Iterator[StepCandidate]:
    """All ways to tile a step; none if autograd would not do what the step does.

    `pricing` is that of its ops, which are tried first if there is none.
    """
    try:
        refuse_untileable(subject)
    except NotTileable as refusal:
        refusals.add(WHOLE_STEP, refusal)
        return
    pricing = pricing or price_captured(subject.captured, options)
    yield from _candidates(subject, pricing, step, options, partial(_tilings, refusals=refusals))
    for captured in with_skips_again(subject.captured, subject.model, subject.args, subject.kwargs):
        pricing = price_captured(captured, options)
        again, divided = replace(subject, captured=captured), partial(_divided, refusals=refusals)
        yield from _candidates(again, pricing, step, options, divided)


def _tilings(graph: Graph, refusals: Refusals) -> Iterator[tuple[Tiling, Streams]]:
    whole = ((tiled,) for tiled in whole_tilings(graph, refusals))
    for tiling in chain(stage_tilings(graph, refusals), divided_tilings(graph, refusals), whole):
        yield tiling, {}
    yield from streamed_tilings(graph, refusals)


def _divided(graph: Graph, refusals: Refusals) -> Iterator[tuple[Tiling, Streams]]:
    return ((tiling, {}) for tiling in divided_tilings(graph, refusals))


def _candidates(
    subject: Subject,
    pricing: Pricing,
    step: Baseline,
    options: PlanOptions,
    tilings_of: Callable[[Graph], Iterable[tuple[Tiling, Streams]]],
) -> Iterator[StepCandidate]:
    """A candidate for each tiling of the step, brought into the order that suits tiles."""
    early = replace(subject.captured, graph=in_tiling_order(subject.captured.graph))
    sweeping = Sweeping(early.graph, early.program.calls, pricing, options.progress)
    for tiling, streams in tilings_of(early.graph):
        yield TiledCandidate(replace(subject, captured=early), tiling, streams, sweeping, step, options)


def swept_subject(subject: Subject, sweeps: Sequence[Sweep]) -> Captured:
    """The step with these sweeps, and with its replacements."""
    return capture_swept(
        subject.captured,
        subject.model,
        subject.args,
        subject.kwargs,
        sweeps=sweeps,
        replacements=subject.replacements,
    )


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
