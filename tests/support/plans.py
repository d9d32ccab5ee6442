"""Plans for tests: one that offloads some of its kept tensors between the halves, and illegal drafts."""

from dataclasses import replace
from typing import Any

import pytest

from stowplan.analyse.timeline import Doing
from stowplan.ir import Kind, Phase
from stowplan.plan.draft import Draft
from stowplan.plan.explain.timeline import timeline_of_plan
from stowplan.plan.judge import verify as judge
from stowplan.plan.judge.simulate import Simulation, simulate
from stowplan.plan.judge.verify import verify
from stowplan.plan.plan import Plan
from stowplan.plan.planner import Planner
from stowplan.plan.pricing import Tier
from stowplan.plan.steps import Compute, Free, Keep, Load, Offload, RecomputeOp, Step, Store

SLOW = 0.02  # of the baseline's peak: the bytes that the tier takes in a hundredth of the step's time


def moved(plan: Plan, most: int = 4) -> Plan:
    """The plan with its largest kept tensors stored after their last forward reader, and loaded back."""
    chosen = _choices(plan)[:most]
    steps = plan.steps
    for name, out, back in chosen:
        steps = _with_move(steps, name, out, back)
    rate = plan.plain_peak_bytes * SLOW * 100 / (plan.plain_seconds or 1.0)
    tier = Tier("host", 1 << 50, rate, rate)
    pricing = replace(plan.pricing, tier=tier)
    played = simulate(plan.graph, steps, pricing)
    return verify(
        replace(
            plan.draft(),
            pricing=pricing,
            steps=steps,
            decisions={**plan.decisions, **{name: Offload("host") for name, _, _ in chosen}},
            allowed_bytes=max(plan.allowed_bytes, played.peak_bytes),
            projected_curve_bytes=played.curve_bytes,
            projected_seconds=played.seconds,
        )
    )


def _choices(plan: Plan) -> list[tuple[str, str, str]]:
    """Tensors with the op after which they may leave and the one before which they must be back."""
    timeline = timeline_of_plan(plan)
    phases = {op.id: op.phase for op in plan.graph.ops}
    seen = {base for tensor in plan.graph.tensors.values() if (base := tensor.alias_of)}
    written_over = {
        old for step in plan.steps if isinstance(step, Compute | RecomputeOp) for _, old in step.overwrites
    }
    found = []
    for stay in sorted(timeline.stays, key=lambda stay: (-stay.nbytes, stay.first)):
        name = stay.tensor
        apart = name not in seen | written_over | plan.graph.held and stay.made and not stay.copy
        if (
            apart
            and isinstance(plan.decisions.get(name), Keep)
            and plan.graph.tensors[name].kind is Kind.ACTIVATION
        ):
            users = [timeline.runs[use].op for use in (stay.first, *stay.uses)]
            out = [op for op in users if phases[op] is Phase.FORWARD]
            back = [op for op in users if phases[op] is Phase.BACKWARD]
            if out and back and {timeline.runs[use].doing for use in stay.uses} == {Doing.COMPUTE}:
                found.append((name, out[-1], back[0]))
    return found


def _with_move(steps: tuple[Step, ...], name: str, out: str, back: str) -> tuple[Step, ...]:
    found: list[Step] = []
    for step in steps:
        if isinstance(step, Compute) and step.op == back:
            found.append(Load((name,)))
        found.append(step)
        if isinstance(step, Compute) and step.op == out:
            found += [Store((name,)), Free((name,))]
    return tuple(found)


def note_verified(patch: pytest.MonkeyPatch) -> list[Simulation]:
    """A list that grows with each draft that `verify` finds to compute its graph."""
    found, checked = list[Simulation](), judge.check_steps

    def noting(*given: Any) -> Simulation:
        found.append(checked(*given))
        return found[-1]

    patch.setattr(judge, "check_steps", noting)
    return found


def without_its_last_op(draft: Draft) -> Draft:
    """Within every limit, with figures that are those of its steps: but an op never runs."""
    last = max(number for number, step in enumerate(draft.steps) if isinstance(step, Compute))
    steps = (*draft.steps[:last], *draft.steps[last + 1 :])
    curve = simulate(draft.graph, steps, draft.pricing).curve_bytes
    return replace(draft, steps=steps, projected_curve_bytes=curve)


def spoil_drafts(patch: pytest.MonkeyPatch) -> None:
    """Let whatever drafts from now on leave out an op."""
    drafted = Planner.draft_at
    patch.setattr(Planner, "draft_at", lambda *given: without_its_last_op(drafted(*given)))
