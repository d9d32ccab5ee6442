"""Pricing a captured step: its ops are probed on this machine, and repeated random draws get memory.

A plan that repeats random draws keeps states of the generator, which are not tensors of the graph.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch

from stowplan.capture import Captured
from stowplan.ir import Graph, Op
from stowplan.ops.effects import Effect, effect_of
from stowplan.ops.table import site_of
from stowplan.plan.decision import RecomputeOp, Step
from stowplan.plan.judge.verify import verify
from stowplan.plan.options import DEFAULT_OPTIONS, PlanOptions
from stowplan.plan.plan import Plan
from stowplan.plan.planner import Planner
from stowplan.plan.pricing import Pricing, price_by_profile
from stowplan.run.cost.machine import device_of
from stowplan.run.cost.probe import probe
from stowplan.run.step.tier import tier_for


def planner_for_captured(captured: Captured, options: PlanOptions = DEFAULT_OPTIONS) -> Planner:
    """The searched frontier of a captured step."""
    pricing = price_captured(captured, options)
    plain = captured.eager.peak_bytes(pricing.workspace_bytes)
    return Planner.of(captured.graph, pricing, options, plain_peak_bytes=plain)


def plan_within(planner: Planner, allowed_bytes: int) -> Plan:
    """The fastest verified plan that is within the budget together with its generator states.

    Plans are examined from the fastest on, so that a larger budget never costs more time.
    """
    room = allowed_bytes
    while (point := planner.frontier.at(room)) is not None:
        beside = _replayed_bytes(planner.problem.graph, point.steps(planner.problem))
        if point.peak_bytes + beside <= allowed_bytes:
            return verify(planner.plan_at(point, allowed_bytes))
        room = point.peak_bytes - 1
    smallest = planner.frontier.points[0].steps(planner.problem)
    beside = _replayed_bytes(planner.problem.graph, smallest)
    refusal = planner.refusal(allowed_bytes - beside)
    raise refusal.beside(beside, "states of the generator to repeat random draws")


def replayed_bytes(plan: Plan) -> int:
    """The bytes that a plan keeps beyond tensors: the generator's state before each recomputed random op.

    One more state exists while draws are repeated: the state to return to.
    """
    return _replayed_bytes(plan.graph, plan.steps)


def _replayed_bytes(graph: Graph, steps: Iterable[Step]) -> int:
    again = {step.op for step in steps if isinstance(step, RecomputeOp)}
    replayed = sum(op.id in again and is_random(graph, op) for op in graph.ops)
    return (replayed + bool(replayed)) * torch.get_rng_state().nbytes


def price_captured(captured: Captured, options: PlanOptions = DEFAULT_OPTIONS) -> Pricing:
    """Seconds and workspace of every op, probed on this machine or read from the cache.

    If offloading is allowed, the tier of the step's device is priced as well.
    """
    probed = probe(captured, progress=options.progress)
    pricing = price_by_profile(captured.graph, probed.profile, probed.workspace_bytes)
    if not options.offloads:
        return pricing
    return replace(pricing, tier=tier_for(device_of(captured.graph)).described())


def replay_bytes(captured: Captured) -> int:
    """The bytes of the generator states that let every random op be recomputed with the same draws."""
    random = sum(is_random(captured.graph, op) for op in captured.graph.ops)
    return (random + bool(random)) * torch.get_rng_state().nbytes


def is_random(graph: Graph, op: Op) -> bool:
    """Whether the op draws random numbers."""
    return bool(effect_of(site_of(graph, op)) & Effect.RANDOM)
