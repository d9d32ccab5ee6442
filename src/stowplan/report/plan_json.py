"""A plan for machines."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict

from stowplan.errors import BudgetTooSmall, PlanTooSlow
from stowplan.plan.explain.explain import Explanation, TiledTensor
from stowplan.plan.explain.timeline import packed_bytes_of
from stowplan.plan.explain.updates import updates_of
from stowplan.plan.plan import Plan
from stowplan.plan.select import Tradeoff
from stowplan.plan.tile_map import TileMap

Json = dict[str, object]


def plan_json(plan: Plan, solve_seconds: float | None = None) -> Json:
    """The figures of a plan, and the seconds of planning where known."""
    return {
        "feasible": True,
        "allowed_bytes": plan.allowed_bytes,
        "projected_peak_bytes": plan.projected_peak_bytes,
        "requested_peak_bytes": plan.requested_peak_bytes,
        "arena": plan.arena and asdict(plan.arena),
        "plain_peak_bytes": plan.plain_peak_bytes,
        "time_ratio": plan.time_ratio,
        "exactness": plan.exactness,
        "against_eager": plan.against_eager.note if plan.against_eager else None,
        "has_backward": plan.has_backward,
        "packed_bytes": None if plan.has_backward else packed_bytes_of(plan),
        "extra_macs": plan.extra_macs,
        "bound": plan.bound,
        "gap": plan.gap,
        "cut_short": plan.cut_short or None,
        "minimum_bytes": plan.minimum_bytes,
        "decisions": Counter(type(decision).__name__.lower() for decision in plan.decisions.values()),
        "tiles": [tiles_json(told) for told in plan.tile_maps],
        "basis": plan.pricing.basis,
        "projected_for": plan.projected_for or None,
        "updates": (found := updates_of(plan.graph)) and asdict(found),
        "steps": len(plan.steps),
        "solve_seconds": solve_seconds,
    }


def tiled_tensor_json(found: TiledTensor) -> Json:
    """A tensor that is never whole."""
    return {
        "tensor": found.tensor,
        "decision": "tile",
        "sweep": found.told.sweep,
        "parts": found.told.parts,
        "maker": found.level.op,
        "whole": found.level.whole,
        "largest_part": found.level.part,
        "work": found.level.work,
        "made_again": found.recomputed,
    }


def tiles_json(told: TileMap) -> Json:
    """A segment that runs in tiles, by its figures; the plan's file has all of it."""
    return {
        "sweep": told.sweep,
        "parts": told.parts,
        "tiles": told.tiles,
        "ops": [level.op for level in told.levels],
        "halo_share": told.halo_share,
        "extra_macs": told.extra_macs,
        "backward_peak_bytes": told.backward_peak_bytes,
        "again": told.again,
        "made_of": told.made_of,
        "made_whole": told.made_whole,
        "within": [tiles_json(inner) for inner in told.within],
    }


def refusal_json(refusal: BudgetTooSmall) -> Json:
    """No plan: the smallest budget, null if nobody searched for it, and the tensors in memory at its peak.

    A plan that was refused because it is slow has the time that it would take.
    """
    slow = {"time_ratio": refusal.time_ratio} if isinstance(refusal, PlanTooSlow) else {}
    return {
        "feasible": False,
        **slow,
        "allowed_bytes": refusal.allowed_bytes,
        "minimum_bytes": refusal.known_minimum_bytes,
        "binding": refusal.binding,
    }


def frontier_json(offers: Iterable[Tradeoff], plain_seconds: float) -> list[Json]:
    """Budget against time, from the smallest budget on."""
    return [
        {
            "budget_bytes": offer.peak_bytes,
            "time_ratio": offer.seconds / (plain_seconds or 1.0),
            "exactness": offer.exactness,
        }
        for offer in offers
    ]


def explanation_json(explanation: Explanation) -> Json:
    """All about one tensor."""
    decision = explanation.decision
    return {
        "tensor": explanation.tensor,
        "bytes": explanation.nbytes,
        "decision": type(decision).__name__.lower() if decision else None,
        "maker": explanation.maker,
        "readers": explanation.readers,
        "spans": explanation.spans,
        "alive_at_peak": explanation.alive_at_peak,
        "again_runs": explanation.again_runs,
        "again_seconds": explanation.again_seconds,
        "again_share": explanation.again_share,
        "transfers": [
            {
                "step": transfer.step,
                "way": "store" if transfer.is_store else "load",
                "start_seconds": transfer.start_seconds,
                "end_seconds": transfer.end_seconds,
            }
            for transfer in explanation.transfers
        ],
        "stall_seconds": explanation.stall_seconds,
        "otherwise": explanation.otherwise,
    }
