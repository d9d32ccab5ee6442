"""Sample by sample: a sweep over all of the step, in which the step of one sample is planned by itself.

Cutting between samples costs nothing, and what one sample needs can be lowered like that of any step: by
making values again, or by tiles inside of the sample.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial

from stowplan.errors import BudgetTooSmall, NotTileable
from stowplan.ir import Graph, Phase
from stowplan.ops.table import shape_of
from stowplan.plan.draft import Draft, Exactness
from stowplan.plan.frontier import floor_of
from stowplan.plan.options import ON_REQUEST, PlanOptions
from stowplan.plan.planner import baseline_peak_of
from stowplan.plan.pricing import Pricing
from stowplan.plan.select import (
    Baseline,
    Candidate,
    GraphCandidate,
    Refusals,
    Selector,
    Tradeoff,
    problem_in_order,
)
from stowplan.plan.steps import Recompute, Tile
from stowplan.plan.tile_map import TileMap, tiled_inside
from stowplan.techniques.tiles.plan.collapse import Collapsed, collapse, name_of_sweep
from stowplan.techniques.tiles.plan.collapsed import stage_candidates
from stowplan.techniques.tiles.plan.costs import costs_of_sweep
from stowplan.techniques.tiles.plan.mapping import tile_map_of
from stowplan.techniques.tiles.plan.rects import cut_tensors
from stowplan.techniques.tiles.plan.rounds import rounds_of
from stowplan.techniques.tiles.plan.samples import sample_step
from stowplan.techniques.tiles.plan.segment import WHOLE_STEP, Segment, segment_of
from stowplan.techniques.tiles.plan.sweeps import GraphWithSweeps, Sweeps, with_moves
from stowplan.units import format_bytes

_MUCH = 2**50  # bytes: so much that it decides where the peak is


def sample_candidates(
    graph: Graph,
    pricing: Pricing,
    step: Baseline,
    options: PlanOptions,
    refusals: Refusals,
) -> Iterator[Candidate]:
    """The one way to go sample by sample, if the step has several and ends in a loss that adds up."""
    try:
        segment = segment_of(graph, [op.id for op in graph.ops if op.phase is Phase.FORWARD])
        cut = shape_of(graph.tensors[cut_tensors(segment)[0]]) if segment.loss else ()
        if len(cut) > 1 and cut[0] > 1:
            parts = (cut[0], *(1 for _ in cut[1:]))
            yield SampleCandidate(segment, parts, pricing, step, options)
    except NotTileable as refusal:
        refusals.add(f"{WHOLE_STEP}, sample by sample", refusal)


class SampleCandidate:
    """A sweep over the samples. The plan of one is made for what the budget leaves beside all else."""

    def __init__(
        self,
        segment: Segment,
        parts: tuple[int, ...],
        pricing: Pricing,
        step: Baseline,
        options: PlanOptions,
    ) -> None:
        self._segment, self._parts, self._pricing, self._step = segment, parts, pricing, step
        self._options = options
        rounds = rounds_of(segment, parts)
        if len(rounds) > 1:
            raise NotTileable(f"{rounds[0].statistics[0].id} looks at all samples")
        self._costs = replace(costs_of_sweep(segment, rounds), backward_peak_bytes=0)
        self._sample = sample_step(segment, rounds[0].tiles[0], pricing)
        self._name = name_of_sweep(segment)
        self.stretches = (f"{WHOLE_STEP}, sample by sample",)

    @cached_property
    def floor_bytes(self) -> int:
        return self._beside_bytes + min(
            candidate.floor_bytes for candidate in (self._inner.plain, *self._inner.candidates)
        )

    def bounds(self, allowed_bytes: int) -> Iterator[float]:
        room = allowed_bytes - self._beside_bytes
        least = min(
            bound
            for candidate in (self._inner.plain, *self._inner.candidates)
            for bound in candidate.bounds(room)
        )
        yield self._other_seconds + self._costs.tiles * least

    def draft(self, allowed_bytes: int) -> Draft:
        try:
            inner, _ = self._inner.answer(allowed_bytes - self._beside_bytes)
        except BudgetTooSmall as fault:
            raise self._too_small(fault, allowed_bytes) from fault
        found = self._around(inner).draft(allowed_bytes)
        if inner.minimum_bytes is None:
            return replace(found, minimum_bytes=None)
        return replace(found, minimum_bytes=inner.minimum_bytes + self._beside_bytes)

    def tradeoffs(self) -> Iterator[Tradeoff]:
        for offer in self._inner.tradeoffs():
            seconds = self._other_seconds + self._costs.tiles * offer.seconds
            yield Tradeoff(offer.peak_bytes + self._beside_bytes, seconds, Exactness.ROUNDING)

    @cached_property
    def _collapsed(self) -> Collapsed:
        """The step as if a sample took no memory."""
        return collapse(self._segment, self._costs, self._pricing)

    @cached_property
    def _other_seconds(self) -> float:
        """The seconds of ops that run once for all samples."""
        pricing, graph = self._collapsed.pricing, self._collapsed.graph
        return sum(pricing.seconds[op.id] for op in graph.ops if op.id != self._name)

    @cached_property
    def _beside_bytes(self) -> int:
        """The bytes around the step of a sample: other samples, sums of gradients."""
        pricing = self._collapsed.pricing
        workspace = {**pricing.workspace_bytes, self._name: _MUCH}
        around = problem_in_order(self._collapsed.graph, replace(pricing, workspace_bytes=workspace))
        return floor_of(around) - _MUCH - self._sample.outside_bytes

    @cached_property
    def _inner(self) -> Selector[Candidate]:
        """Answers budgets for the step of one sample, whose exactness is that of a tile in any case."""
        graph, pricing = self._sample.graph, self._sample.pricing
        seconds = sum(pricing.seconds[op.id] for op in graph.ops)
        step = Baseline(seconds, baseline_peak_of(graph, pricing))
        allow = set(self._options.allow).difference(ON_REQUEST)  # tensors leave the step, not a sweep in it
        options = replace(self._options, allow=allow)
        plain: Candidate = GraphCandidate(graph, pricing, step, with_moves(options, graph))
        candidates = partial(stage_candidates, graph, pricing, step, options)
        return Selector(plain, step, candidates, "time")

    def _around(self, inner: Draft) -> GraphWithSweeps:
        """The step of which each sample runs by this plan."""
        pricing, tiles = self._collapsed.pricing, self._costs.tiles
        seconds = {**pricing.seconds, self._name: tiles * inner.projected_seconds}
        peak = inner.projected_peak_bytes - self._sample.outside_bytes
        workspace = {**pricing.workspace_bytes, self._name: peak}
        priced = replace(pricing, seconds=seconds, workspace_bytes=workspace)
        return GraphWithSweeps(
            self._collapsed.graph, priced, self._step, self._options, self._sweeps(inner, peak)
        )

    def _sweeps(self, inner: Draft, peak_bytes: int) -> Sweeps:
        extra = self._costs.tiles * inner.extra_macs
        decided = tiled_inside(self._name, self._parts, self._segment.inside)
        draw = partial(self._maps, inner, peak_bytes, extra)
        return Sweeps({**decided, **_tiled(inner)}, extra, maps=draw)

    def _maps(self, inner: Draft, peak_bytes: int, extra_macs: int) -> tuple[TileMap, ...]:
        costs = replace(self._costs, backward_peak_bytes=peak_bytes)
        told = tile_map_of(self._segment, self._parts, costs, sweep=self._name, extra_macs=extra_macs)
        again = (name for name, choice in inner.decisions.items() if isinstance(choice, Recompute))
        return (replace(told, again=tuple(again), within=inner.tile_maps),)

    def _too_small(self, fault: BudgetTooSmall, allowed_bytes: int) -> BudgetTooSmall:
        minimum = fault.minimum_bytes + self._beside_bytes
        return BudgetTooSmall(
            f"{format_bytes(allowed_bytes)} allowed, but even sample by sample the smallest plan found needs"
            f" {format_bytes(minimum)} ({minimum} bytes); it binds through {', '.join(fault.binding[:4])}",
            allowed_bytes=allowed_bytes,
            minimum_bytes=minimum,
            binding=fault.binding,
        )


def _tiled(draft: Draft) -> dict[str, Tile]:
    return {name: choice for name, choice in draft.decisions.items() if isinstance(choice, Tile)}
