"""Transfers as ops and on a clock, for reports: when each begins and ends, and which op waits."""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import assert_never

from stowplan.ir import Graph, Op, Phase, Use
from stowplan.plan.draft import Schedule
from stowplan.plan.judge.engines import Stall
from stowplan.plan.judge.simulate import simulate
from stowplan.plan.steps import Compute, Free, Load, RecomputeOp, Store, transfer_id

STORE, LOAD = "stowplan.store", "stowplan.load"


@dataclass(frozen=True, slots=True)
class TransferSpan:
    """Seconds from the beginning of the step."""

    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        """From start to end."""
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True, slots=True)
class Clock:
    """When each run of a plan's timeline begins and ends, and what the ops wait for in between."""

    spans: tuple[TransferSpan, ...]
    stalls: tuple[Stall, ...]


def with_transfers(plan: Schedule) -> Graph:
    """The graph of a plan with an op for each storage that is moved, each way."""
    moves = {transfer_id(step): step for step in plan.steps if isinstance(step, Store | Load)}
    ops = (_op(name, step) for name, step in moves.items())
    return replace(plan.graph, ops=(*plan.graph.ops, *ops)) if moves else plan.graph


def _op(name: str, step: Store | Load) -> Op:
    uses = tuple(map(Use, step.tensors))
    if isinstance(step, Store):
        return Op(name, STORE, Phase.TRANSFER, uses, ())
    return Op(name, LOAD, Phase.TRANSFER, (), uses)


def clock_of(plan: Schedule) -> Clock:
    """The clock of a plan by its prices."""
    pricing = plan.pricing
    played = simulate(plan.graph, plan.steps, pricing)
    moved = {move.step: TransferSpan(move.start_seconds, move.end_seconds) for move in played.transfers}
    waits: defaultdict[int, float] = defaultdict(float)
    for stall in played.stalls:
        waits[stall.step] += stall.seconds
    spans: list[TransferSpan] = []
    now = 0.0
    for number, step in enumerate(plan.steps):
        now += waits[number]
        match step:
            case Compute(op) | RecomputeOp(op):
                spans.append(TransferSpan(now, now + pricing.seconds[op]))
                now = spans[-1].end_seconds
            case Store() | Load():
                spans.append(moved[number])
            case Free():
                pass
            case _:
                assert_never(step)
    return Clock(tuple(spans), played.stalls)
