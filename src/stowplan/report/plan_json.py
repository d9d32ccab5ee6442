"""A plan for machines."""

from collections import Counter

from stowplan.plan.explain import Explanation
from stowplan.plan.frontier import Frontier
from stowplan.plan.plan import Plan

Json = dict[str, object]


def plan_json(plan: Plan, solve_seconds: float) -> Json:
    """The figures of a plan."""
    return {
        "feasible": True,
        "allowed_bytes": plan.allowed_bytes,
        "projected_peak_bytes": plan.projected_peak_bytes,
        "plain_peak_bytes": plan.plain_peak_bytes,
        "time_ratio": plan.time_ratio,
        "extra_macs": plan.extra_macs,
        "bound": plan.bound,
        "gap": plan.gap,
        "minimum_bytes": plan.minimum_bytes,
        "decisions": Counter(type(decision).__name__.lower() for decision in plan.decisions.values()),
        "basis": plan.pricing.basis,
        "steps": len(plan.steps),
        "solve_seconds": solve_seconds,
    }


def frontier_json(frontier: Frontier, plain_seconds: float) -> list[Json]:
    """Budget against time, from the smallest budget on."""
    return [
        {"budget_bytes": point.peak_bytes, "time_ratio": 1 + point.extra_seconds / (plain_seconds or 1.0)}
        for point in frontier.points
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
