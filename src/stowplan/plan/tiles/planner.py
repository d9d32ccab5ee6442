"""Tiles in the plan: each way to tile a graph is another graph, and the best plan over all of them is taken.

Ways are looked at in the order of their seconds, and only while they could still win: a budget that the plain
graph meets at no cost is answered without any tile.
"""

from dataclasses import dataclass, field, replace

from stowplan.errors import BudgetTooSmall
from stowplan.ir import Graph
from stowplan.plan.decision import Decision, Tile
from stowplan.plan.frontier import floor_of
from stowplan.plan.make import Planner
from stowplan.plan.plan import Plan
from stowplan.plan.pricing import Pricing
from stowplan.plan.problem import problem_of
from stowplan.plan.tiles.candidates import Tiling, tilings_of
from stowplan.plan.tiles.collapse import Collapsed, collapse
from stowplan.plan.tiles.segment import segment_of


@dataclass(frozen=True, slots=True)
class Variant:
    """A graph with sweeps, and what is decided about the tensors that it no longer has."""

    collapsed: Collapsed
    decisions: dict[str, Decision]
    floor_bytes: int

    @property
    def seconds(self) -> float:
        """What it takes before anything is recomputed besides."""
        return sum(self.collapsed.pricing.seconds[op.id] for op in self.collapsed.graph.ops)


@dataclass(slots=True)
class TilePlanner:
    """A planner that may tile. Planners of variants are made when a budget first asks for them."""

    plain: Planner
    variants: tuple[Variant, ...]
    moves: int | None = None
    _planners: dict[int, Planner] = field(default_factory=dict)

    @staticmethod
    def of(graph: Graph, pricing: Pricing, *, moves: int | None = None) -> "TilePlanner":
        """Search the plain frontier, and price every way to tile."""
        variants = (variant_of(graph, pricing, tiling) for tiling in tilings_of(graph))
        ordered = sorted(variants, key=lambda variant: variant.seconds)
        return TilePlanner(Planner.of(graph, pricing, moves=moves), tuple(ordered), moves)

    def plan(self, allowed_bytes: int) -> Plan:
        """The fastest plan within `allowed_bytes`, with tiles or without; else raises BudgetTooSmall."""
        best = _within(self.plain, allowed_bytes)
        for number, variant in enumerate(self.variants):
            if best is not None and variant.seconds >= best.projected_seconds:
                break
            if variant.floor_bytes > allowed_bytes:
                continue
            found = _within(self._planner(number), allowed_bytes)
            if found is not None and (best is None or found.projected_seconds < best.projected_seconds):
                best = self._told(found, variant)
        if best is None:
            raise self._too_small(allowed_bytes)
        return best

    @property
    def minimum_bytes(self) -> int:
        """The smallest budget for which a plan was found; makes the planners of all variants."""
        planners = (self._planner(number) for number in range(len(self.variants)))
        return min(planner.minimum_bytes for planner in (self.plain, *planners))

    def _planner(self, number: int) -> Planner:
        if number not in self._planners:
            collapsed = self.variants[number].collapsed
            self._planners[number] = Planner.of(collapsed.graph, collapsed.pricing, moves=self.moves)
        return self._planners[number]

    def _told(self, plan: Plan, variant: Variant) -> Plan:
        """The plan told against the plain step."""
        plain_seconds = sum(self.plain.problem.seconds)
        return replace(
            plan,
            decisions={**plan.decisions, **variant.decisions},
            plain_peak_bytes=self.plain.plain_peak_bytes,
            plain_seconds=plain_seconds,
            bound_seconds=min(plain_seconds, plan.bound_seconds),
            extra_macs=plan.extra_macs + variant.collapsed.extra_macs,
        )

    def _too_small(self, allowed_bytes: int) -> BudgetTooSmall:
        planners = [self.plain, *(self._planner(number) for number in range(len(self.variants)))]
        smallest = min(planners, key=lambda planner: planner.minimum_bytes)
        try:
            smallest.plan(allowed_bytes)
        except BudgetTooSmall as fault:
            return fault
        raise AssertionError("a planner answered a budget below its minimum")


def variant_of(graph: Graph, pricing: Pricing, tiling: Tiling) -> Variant:
    """The graph with all segments of a tiling collapsed, one after the other."""
    collapsed, extra = Collapsed(graph, pricing, 0), 0
    decisions: dict[str, Decision] = {}
    for tiled in tiling:
        segment = segment_of(collapsed.graph, [op.id for op in (*tiled.segment.ops, *tiled.segment.apart)])
        decisions |= {name: Tile(segment.ops[0].id, tiled.parts) for name in segment.inside}
        collapsed = collapse(segment, tiled.costs, collapsed.pricing)
        extra += collapsed.extra_macs
    seconds = [collapsed.pricing.seconds[op.id] for op in collapsed.graph.ops]
    problem = problem_of(collapsed.graph, seconds, collapsed.pricing.workspace_bytes)
    return Variant(replace(collapsed, extra_macs=extra), decisions, floor_of(problem))


def _within(planner: Planner, allowed_bytes: int) -> Plan | None:
    return planner.plan(allowed_bytes) if allowed_bytes >= planner.minimum_bytes else None
