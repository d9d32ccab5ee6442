"""Sample by sample: a sweep over all of the step, in which the step of one sample is planned by itself.

Cutting between samples costs nothing, and what one sample needs can be lowered like that of any step: by
making values again, or by tiles inside of the sample.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property, partial

from stowplan.errors import BudgetTooSmall, NotTileable
from stowplan.ir import Graph, Phase
from stowplan.ops.table import shape_of
from stowplan.plan.candidate import GraphWay, Offer, PlainStep, Sweeps, Way, problem_in_order, search_moves
from stowplan.plan.decision import Recompute, Tile
from stowplan.plan.frontier import floor_of
from stowplan.plan.plan import Exactness, Plan
from stowplan.plan.planner import ON_REQUEST, plain_peak_of
from stowplan.plan.pricing import Pricing
from stowplan.plan.select import MasterPlanner, Prefer
from stowplan.plan.tile_map import TileMap, tiled_inside
from stowplan.plan.tiles.collapse import Collapsed, collapse, name_of_sweep
from stowplan.plan.tiles.collapsed_ways import stage_ways
from stowplan.plan.tiles.costs import costs_of_sweep
from stowplan.plan.tiles.mapping import tile_map_of
from stowplan.plan.tiles.rects import cut_tensors
from stowplan.plan.tiles.rounds import rounds_of
from stowplan.plan.tiles.samples import sample_step
from stowplan.plan.tiles.segment import Segment, segment_of
from stowplan.plan.untiled import WHOLE_STEP, Untiled
from stowplan.units import format_bytes

_MUCH = 2**50  # bytes: so much that it decides where the peak is


def sample_ways(
    graph: Graph,
    pricing: Pricing,
    step: PlainStep,
    untiled: Untiled,
    *,
    allow: Iterable[str],
    moves: int | None,
) -> Iterator[Way]:
    """The one way to go sample by sample, if the step has several and ends in a loss that adds up."""
    try:
        segment = segment_of(graph, [op.id for op in graph.ops if op.phase is Phase.FORWARD])
        cut = shape_of(graph.tensors[cut_tensors(segment)[0]]) if segment.loss else ()
        if len(cut) > 1 and cut[0] > 1:
            parts = (cut[0], *(1 for _ in cut[1:]))
            yield SampleWay(segment, parts, pricing, step, allow=allow, moves=moves)
    except NotTileable as refusal:
        untiled.add(f"{WHOLE_STEP}, sample by sample", refusal)


class SampleWay:
    """A sweep over the samples. The plan of one is made for what the budget leaves beside all else."""

    def __init__(
        self,
        segment: Segment,
        parts: tuple[int, ...],
        pricing: Pricing,
        step: PlainStep,
        *,
        allow: Iterable[str],
        moves: int | None,
    ) -> None:
        self._segment, self._parts, self._pricing, self._step = segment, parts, pricing, step
        self._allow, self._moves = tuple(allow), moves
        rounds = rounds_of(segment, parts)
        if len(rounds) > 1:
            raise NotTileable(f"{rounds[0].statistics[0].id} looks at all samples")
        self._costs = replace(costs_of_sweep(segment, rounds), backward_peak_bytes=0)
        self._sample = sample_step(segment, rounds[0].tiles[0], pricing)
        self._name = name_of_sweep(segment)
        self.stretches = (f"{WHOLE_STEP}, sample by sample",)

    @cached_property
    def floor_bytes(self) -> int:
        return self._beside_bytes + min(way.floor_bytes for way in (self._inner.plain, *self._inner.ways))

    def bounds(self, allowed_bytes: int) -> Iterator[float]:
        room = allowed_bytes - self._beside_bytes
        least = min(bound for way in (self._inner.plain, *self._inner.ways) for bound in way.bounds(room))
        yield self._other_seconds + self._costs.tiles * least

    def plan(self, allowed_bytes: int) -> Plan:
        try:
            inner = self._inner.plan(allowed_bytes - self._beside_bytes)
        except BudgetTooSmall as fault:
            raise self._too_small(fault, allowed_bytes) from fault
        found = self._around(inner).plan(allowed_bytes)
        return replace(found, minimum_bytes=inner.minimum_bytes + self._beside_bytes)

    def offers(self) -> Iterator[Offer]:
        for offer in self._inner.offers():
            seconds = self._other_seconds + self._costs.tiles * offer.seconds
            yield Offer(offer.peak_bytes + self._beside_bytes, seconds, Exactness.ROUNDING)

    @cached_property
    def _collapsed(self) -> Collapsed:
        """The step as if a sample took no memory."""
        return collapse(self._segment, self._costs, self._pricing)

    @cached_property
    def _other_seconds(self) -> float:
        """What is done once for all samples."""
        pricing, graph = self._collapsed.pricing, self._collapsed.graph
        return sum(pricing.seconds[op.id] for op in graph.ops if op.id != self._name)

    @cached_property
    def _beside_bytes(self) -> int:
        """What is there while the step of a sample runs and is not its own: samples, sums of gradients."""
        pricing = self._collapsed.pricing
        workspace = {**pricing.workspace_bytes, self._name: _MUCH}
        around = problem_in_order(self._collapsed.graph, replace(pricing, workspace_bytes=workspace))
        return floor_of(around) - _MUCH - self._sample.outside_bytes

    @cached_property
    def _inner(self) -> MasterPlanner[Way]:
        """Answers budgets for the step of one sample, whose exactness is that of a tile in any case."""
        graph, pricing = self._sample.graph, self._sample.pricing
        seconds = sum(pricing.seconds[op.id] for op in graph.ops)
        step = PlainStep(seconds, plain_peak_of(graph, pricing))
        allow = set(self._allow).difference(ON_REQUEST)  # tensors leave the step, not a sweep in it
        moves = search_moves(graph) if self._moves is None else self._moves
        plain: Way = GraphWay(graph, pricing, step, allow=allow, moves=moves)
        ways = partial(stage_ways, graph, pricing, step, allow=allow, moves=self._moves)
        return MasterPlanner(plain, step, ways, Prefer.TIME)

    def _around(self, inner: Plan) -> GraphWay:
        """The step of which each sample runs by this plan."""
        pricing, tiles = self._collapsed.pricing, self._costs.tiles
        seconds = {**pricing.seconds, self._name: tiles * inner.projected_seconds}
        peak = inner.projected_peak_bytes - self._sample.outside_bytes
        workspace = {**pricing.workspace_bytes, self._name: peak}
        priced = replace(pricing, seconds=seconds, workspace_bytes=workspace)
        sweeps = self._sweeps(inner, peak)
        return GraphWay(
            self._collapsed.graph, priced, self._step, allow=self._allow, sweeps=sweeps, moves=self._moves
        )

    def _sweeps(self, inner: Plan, peak_bytes: int) -> Sweeps:
        extra = self._costs.tiles * inner.extra_macs
        decided = tiled_inside(self._name, self._parts, self._segment.inside)
        draw = partial(self._maps, inner, peak_bytes, extra)
        return Sweeps({**decided, **_tiled(inner)}, extra, maps=draw)

    def _maps(self, inner: Plan, peak_bytes: int, extra_macs: int) -> tuple[TileMap, ...]:
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


def _tiled(plan: Plan) -> dict[str, Tile]:
    return {name: choice for name, choice in plan.decisions.items() if isinstance(choice, Tile)}
