"""A plan for machines."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict

from stowplan.plan.explain import Explanation
from stowplan.plan.plan import Plan
from stowplan.plan.tiles.ways import Offer

Json = dict[str, object]


def plan_json(plan: Plan, solve_seconds: float) -> Json:
    """The figures of a plan."""
    return {
        "feasible": True,
        "allowed_bytes": plan.allowed_bytes,
        "projected_peak_bytes": plan.projected_peak_bytes,
        "plain_peak_bytes": plan.plain_peak_bytes,
        "time_ratio": plan.time_ratio,
        "exactness": plan.exactness,
        "extra_macs": plan.extra_macs,
        "bound": plan.bound,
        "gap": plan.gap,
        "minimum_bytes": plan.minimum_bytes,
        "decisions": Counter(type(decision).__name__.lower() for decision in plan.decisions.values()),
        "tiles": [asdict(told) for told in plan.tile_maps],
        "basis": plan.pricing.basis,
        "steps": len(plan.steps),
        "solve_seconds": solve_seconds,
    }


def frontier_json(offers: Iterable[Offer], plain_seconds: float) -> list[Json]:
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
        "again_seconds": explanation.again_seconds,
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
