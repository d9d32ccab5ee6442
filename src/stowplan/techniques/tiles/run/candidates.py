"""Tiled candidates for a captured step: captured a second time, with segments computed tile by tile."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from math import inf

from stowplan.capture import Captured
from stowplan.capture.composite import opened_by_name
from stowplan.capture.sparse import READ_SPARSE
from stowplan.errors import NotTileable
from stowplan.ir import Graph, Kind, Op, Phase, Tensor
from stowplan.plan.draft import Draft, Exactness
from stowplan.plan.options import PlanOptions
from stowplan.plan.pricing import Basis, Pricing
from stowplan.plan.select import Baseline, CandidateGroup, GraphCandidate, Refusals, Tradeoff, tradeoffs_of
from stowplan.plan.steps import Decision
from stowplan.plan.tile_map import TileMap, tiled_inside
from stowplan.run.cost.probe import known_seconds
from stowplan.run.planning.planner import (
    STEP_CANDIDATES,
    CapturedCandidate,
    StepCandidate,
    Subject,
    price_captured,
)
from stowplan.run.planning.recapture import check_differentiable
from stowplan.techniques.tiles.plan.borders import in_tiling_order
from stowplan.techniques.tiles.plan.candidates import Tiled, Tiling, stage_tilings, whole_tilings
from stowplan.techniques.tiles.plan.collapse import extra_macs_of
from stowplan.techniques.tiles.plan.costs import SweepCosts
from stowplan.techniques.tiles.plan.joins import divided_tilings
from stowplan.techniques.tiles.plan.mapping import tile_map_of
from stowplan.techniques.tiles.plan.rematerialise import RematerialisedInputs
from stowplan.techniques.tiles.plan.rematerialised_tilings import Rematerialised, rematerialised_tilings
from stowplan.techniques.tiles.plan.segment import WHOLE_STEP, stretch_named
from stowplan.techniques.tiles.plan.sweeps import Sweeps, with_moves
from stowplan.techniques.tiles.run.insertions import capture_with_sweeps
from stowplan.techniques.tiles.run.remade import with_skips_recomputed
from stowplan.techniques.tiles.run.rematerialised import (
    RematerialisedSweep,
    rematerialised_sweeps,
    with_rematerialised_inputs,
)
from stowplan.techniques.tiles.run.sweep import Sweep
from stowplan.techniques.tiles.run.sweep_probes import OPTIMISM, Key, SweepProbes, key_of

_GATHER, _SWEEP = "stowplan.gather.default", "stowplan.sweep.default"
_SWEEP_LOSS = "stowplan.sweep_loss.default"
_SWEEPS = (_SWEEP, _SWEEP_LOSS)
_SURE = 0.75  # of the memory of a tile that is differentiated, as projected


class TiledCandidate:
    """Some segments in sweeps. Capturing it shows its memory; probing it shows its time and its plans."""

    def __init__(
        self,
        subject: Subject,
        tiling: Tiling,
        remats: Rematerialised,
        probes: SweepProbes,
        step: Baseline,
        options: PlanOptions,
    ) -> None:
        self._subject, self._tiling, self._step, self._options = subject, tiling, step, options
        self._remats, self._probes = remats, probes

    @property
    def stretches(self) -> tuple[str, ...]:
        return tuple(stretch_named(tiled.segment.ops) for tiled in self._tiling)

    def bounds(self, allowed_bytes: int) -> Iterator[float]:
        """Lower bounds: by the work of the sweeps; by what the captured step recomputes beside them; by the
        probes of one sweep after the other; by the probed step. Last, what a search for the budget finds."""
        if self.least_bytes > allowed_bytes:
            yield inf
            return
        least = -inf
        while (sharper := self._optimistic_seconds()) > least:  # as long as other candidates' probes help
            yield (least := sharper)
        if self.floor_bytes > allowed_bytes:
            yield inf
            return
        if not self._options.offloads:
            least = max(least, self._sketch.least_seconds(allowed_bytes))
        yield least
        expected = {tiled: sum(self._probes.optimistic_seconds(tiled)) for tiled in self._tiling}
        for tiled in sorted(expected, key=lambda tiled: -expected[tiled]):
            captured = None if tiled in self._remats else self.captured
            least += self._probes.measured_seconds(tiled, captured) - expected[tiled]
            yield least
        yield self._tried.least_seconds(allowed_bytes)
        yield self._tried.seconds_found(allowed_bytes)

    def _optimistic_seconds(self) -> float:
        probes, tiling = self._probes, self._tiling
        in_tiles = (sum(probes.optimistic_seconds(tiled)) - probes.seconds_whole(tiled) for tiled in tiling)
        return self._step.seconds + sum(in_tiles) + sum(map(probes.optimistic_again, self._remats.values()))

    @cached_property
    def least_bytes(self) -> int:
        """A lower bound on `floor_bytes` that needs no capture: of differentiating a tile of each sweep, and
        of the ops beside the sweeps."""
        remade = (segment for remat in self._remats.values() for segment in remat.segments)
        segments = (*(tiled.segment for tiled in self._tiling), *remade)
        beside = self._probes.floor_beside({op.id for segment in segments for op in segment.ops})
        return max(
            beside,
            *(
                self._probes.surely_there(tiled) + _bytes_at_backward(tiled, self._remats.get(tiled))
                for tiled in self._tiling
            ),
        )

    @property
    def floor_bytes(self) -> int:
        """The smallest budget of the captured graph if a tile takes little more memory than its tensors."""
        return self._sketch.floor_bytes

    @cached_property
    def _sketch(self) -> GraphCandidate:
        """The captured graph, priced without probes: the sweeps by optimistic seconds and by the memory of
        their tensors, other ops by what is known of them, or as if they took no time."""
        tiled_by = dict(zip((sweep.name for sweep in self._sweeps), self._tiling, strict=True))
        tiled_by |= {each.sweep.name: tiled_by[name] for name, each in self._rematerialised.items()}
        ops = self.captured.graph.ops
        sweeps = {op.id: found for op in ops if (found := tiled_by.get(str(op.attributes.get("name"))))}
        seconds = {**dict.fromkeys((op.id for op in ops), 0.0), **known_seconds(self.captured)}
        seconds |= {op.id: self._optimistic_part(op, sweeps[op.id]) for op in ops if op.id in sweeps}
        workspace = {op.id: _workspace(op, sweeps[op.id].costs) for op in ops if op.id in sweeps}
        pricing = Pricing(seconds, Basis.MEASURED, workspace)
        return GraphCandidate(self.captured.graph, pricing, self._step, PlanOptions(allow=()))

    def _optimistic_part(self, sweep: Op, tiled: Tiled) -> float:
        forward, backward = self._probes.optimistic_seconds(tiled)
        parts = {_GATHER: 0.0, _SWEEP: forward, _SWEEP_LOSS: forward + backward}
        return parts.get(sweep.type, backward)

    def draft(self, allowed_bytes: int) -> Draft:
        return self._decided.told(self._tried.draft(allowed_bytes), self._step)

    def tradeoffs(self) -> Iterable[Tradeoff]:
        return tradeoffs_of(self._tried.planner, Exactness.ROUNDING)

    @cached_property
    def _sweeps(self) -> tuple[Sweep, ...]:
        return tuple(map(self._probes.sweep, self._tiling))

    @cached_property
    def _rematerialised(self) -> dict[str, RematerialisedSweep]:
        """By the name of the sweep, the sweep and its backward that rematerialises inputs."""
        pairs = zip(self._tiling, self._sweeps, strict=True)
        remats = {sweep.name: self._remats[tiled] for tiled, sweep in pairs if tiled in self._remats}
        return rematerialised_sweeps(self._sweeps, remats, self._subject.captured.program.calls)

    @cached_property
    def captured(self) -> Captured:
        with_sweeps = subject_with_sweeps(self._subject, self._sweeps)
        return with_rematerialised_inputs(with_sweeps, self._sweeps, self._rematerialised)

    @cached_property
    def _tried(self) -> CapturedCandidate:
        pricing = price_captured(self.captured, self._options)
        options = with_moves(self._options, self.captured.graph)
        return CapturedCandidate(self.captured, pricing, self._step, options, is_one_of_many=True)

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
                remat=self._remats.get(tiled),
            )
            for sweep, tiled in zip(self._ops(), self._tiling, strict=True)
        )

    def _extra_macs(self, tiled: Tiled) -> int:
        remat = self._remats.get(tiled)
        return extra_macs_of(tiled.segment, tiled.costs) + (remat.macs if remat else 0)

    def _ops(self) -> list[str]:
        """The forward ops of the sweeps in the captured graph."""
        forward = [op for op in self.captured.graph.ops if op.phase is Phase.FORWARD and op.type in _SWEEPS]
        named = {str(op.attributes.get("name")): op.id for op in forward}
        return [named[sweep.name] for sweep in self._sweeps]


def _workspace(sweep: Op, costs: SweepCosts) -> int:
    """A lower estimate of a tile's memory: backward may hold less than the sum of its tensors."""
    ahead = {_GATHER: costs.gathering_peak_bytes, _SWEEP: costs.forward_peak_bytes}
    return ahead.get(sweep.type, _differentiated_bytes(costs))


def _differentiated_bytes(costs: SweepCosts) -> int:
    return max(costs.forward_peak_bytes, round(_SURE * costs.backward_peak_bytes))


def _bytes_at_backward(tiled: Tiled, remat: RematerialisedInputs | None) -> int:
    """Bytes of what the backward of a sweep reads, of the gradients that it makes, and of a tile.

    The gradient of an input may be written over that of an output that looks like it.
    """
    segment = tiled.segment
    tensors = segment.graph.tensors
    read = [tensors[name] for name in (remat.read if remat else segment.inputs)]
    gradients = {t.gradient_of: t for t in tensors.values() if t.gradient_of is not None}
    incoming = [gradients[name] for name in segment.outputs if name in gradients and segment.loss is None]
    reused = Counter((gradient.shape, gradient.dtype) for gradient in incoming)
    sums = list[Tensor]()
    for made in (tensors[name] for name in segment.inputs if name in gradients):
        if reused[look := (made.shape, made.dtype)]:
            reused[look] -= 1
        else:
            sums.append(made)
    held = _bytes_of(read, Kind.ACTIVATION) + _bytes_of((*incoming, *sums), *Kind)
    return held + _differentiated_bytes(tiled.costs)


def _bytes_of(tensors: Iterable[Tensor], *kinds: Kind) -> int:
    return sum(t.nbytes or 0 for t in tensors if t.kind in kinds and t.alias_of is None)


@STEP_CANDIDATES.register("tile")
def tiled_candidates(
    subject: Subject, pricing: Pricing | None, step: Baseline, options: PlanOptions, refusals: Refusals
) -> Iterator[StepCandidate | CandidateGroup[StepCandidate]]:
    """All tiled candidates for a step; none if autograd would compute something else than the step.

    `pricing` has the prices of its ops; without it, the ops are probed first. Steps with recomputed skips
    come as groups. Their bounds assume that their tiles are no faster than those of the step itself.
    """
    try:
        refuse_untileable(subject)
    except NotTileable as refusal:
        refusals.add(WHOLE_STEP, refusal)
        return
    pricing = pricing or price_captured(subject.captured, options)
    yield from _candidates(subject, pricing, step, options, partial(_tilings, refusals=refusals))
    for captured in with_skips_recomputed(subject.captured, subject.model, subject.args, subject.kwargs):
        again, divided = replace(subject, captured=captured), partial(_divided, refusals=refusals)
        prices = price_captured(captured, options)
        recomputed = sum(prices.seconds.values()) - sum(pricing.seconds.values())
        make = partial(_candidates, again, prices, step, options, divided)
        yield CandidateGroup(step.seconds + OPTIMISM * recomputed, make)


def _tilings(graph: Graph, refusals: Refusals) -> Iterator[tuple[Tiling, Rematerialised]]:
    whole = ((tiled,) for tiled in whole_tilings(graph, refusals))
    for tiling in chain(stage_tilings(graph, refusals), divided_tilings(graph, refusals), whole):
        yield tiling, {}
    if graph.has_backward:
        yield from rematerialised_tilings(graph, refusals)


def _divided(graph: Graph, refusals: Refusals) -> Iterator[tuple[Tiling, Rematerialised]]:
    return ((tiling, {}) for tiling in divided_tilings(graph, refusals))


def _candidates(
    subject: Subject,
    pricing: Pricing,
    step: Baseline,
    options: PlanOptions,
    tilings_of: Callable[[Graph], Iterable[tuple[Tiling, Rematerialised]]],
) -> Iterator[StepCandidate]:
    """A candidate for each tiling of the step, brought into the order that suits tiles."""
    early = replace(subject.captured, graph=in_tiling_order(subject.captured.graph))
    probes = SweepProbes(early.graph, early.program.calls, pricing, options.search.progress)
    seen = set[tuple[Key, ...]]()
    for tiling, remats in tilings_of(early.graph):
        keys = tuple(map(key_of, tiling))
        if keys in seen and not remats:
            continue
        seen.add(keys)
        yield TiledCandidate(replace(subject, captured=early), tiling, remats, probes, step, options)


def subject_with_sweeps(subject: Subject, sweeps: Sequence[Sweep]) -> Captured:
    """The step with these sweeps, and with its replacements."""
    return capture_with_sweeps(
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
    calls = subject.captured.program.calls.values()
    if any(call.target is READ_SPARSE for call in calls):
        raise NotTileable("the step reads a sparse tensor, of which tiles know no rows")
    check_differentiable(subject.captured, subject.model, subject.args, subject.kwargs)


def _has_foreign_parameters(subject: Subject) -> bool:
    """Whether a loss brings tensors of its own, which the model as captured once more does not have."""
    program, model = subject.captured.program, subject.model
    held = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    known = opened_by_name(dict(held)).keys()
    named = (*program.parameters.values(), *program.buffers.values())
    return any(names[0] not in known for names in named)
