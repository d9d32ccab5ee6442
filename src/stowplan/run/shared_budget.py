"""One budget for several graphs that run within one step, as graph breaks make them.

While a graph runs, what the others have in memory counts against it: their parameters and inputs, what those
before it keep for their backward, and the gradients of those after it, whose backward comes first.

The first time a sequence of graphs runs nobody knows what is still to come, so each takes the smallest plan
it has. Once the step is over its sequence is known, and from the next one on its graphs are planned together:
from their smallest plans they go up to faster ones, step by step where most seconds are gained per byte, as
long as none is over the budget. A graph that belongs to several sequences takes the smallest of the plans
they leave it.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from stowplan.errors import BudgetTooSmall
from stowplan.plan.plan import Plan
from stowplan.plan.simulate import alive_at
from stowplan.run.living import LivingStorages
from stowplan.run.member import Member, kept_bytes, peak_bytes
from stowplan.units import format_bytes


@dataclass(frozen=True, slots=True)
class Visit:
    """A graph's run within a step, in bytes: what of its inputs is its own, what it was handed by graphs
    before it, and the gradients that it leaves behind."""

    member: Member
    own_bytes: int
    handed_bytes: int
    gradient_bytes: int


class SharedBudget:
    """Hands out plans, and keeps account of what the graphs hold meanwhile."""

    def __init__(self, allowed_bytes: int) -> None:
        self.allowed_bytes = allowed_bytes
        self.plans: list[Plan] = []  # of the step that is under way, or was last
        self._standing, self._handed = LivingStorages(), LivingStorages()
        self._most_standing_bytes = 0
        self._kept_bytes: dict[object, int] = {}  # by run that waits for its backward
        self._sequence: list[Visit] = []
        self._known: set[tuple[Member, ...]] = set()

    def plan_for(self, member: Member, inputs: Sequence[Tensor], wanted: Iterable[Tensor]) -> Plan:
        """The plan to run `member` by, now. `wanted` are the inputs whose gradients stay when it is done."""
        if not self._kept_bytes:
            self._end_step()
        self._standing.add(tensor for tensor in inputs if tensor not in self._handed)
        self._most_standing_bytes = max(self._most_standing_bytes, self._standing.nbytes)
        visit = Visit(
            member,
            own_bytes=self._standing.bytes_among(inputs),
            handed_bytes=self._handed.bytes_among(inputs),
            gradient_bytes=sum(tensor.nbytes for tensor in wanted),
        )
        kept = sum(self._kept_bytes.values()) - visit.handed_bytes
        plan = self._fitting_plan(member, self._standing.nbytes - visit.own_bytes + kept)
        self._sequence.append(visit)
        self.plans.append(plan)
        return plan

    def opened(self, plan: Plan, outputs: Iterable[Tensor]) -> object:
        """Note what a run keeps for its backward, its outputs included. Returns what `closed` is told."""
        run = object()
        self._kept_bytes[run] = kept_bytes(plan)
        self._handed.add(outputs)
        return run

    def closed(self, run: object) -> None:
        """The run's backward is done, or will never come. May be told twice."""
        self._kept_bytes.pop(run, None)

    def _fitting_plan(self, member: Member, outside_bytes: int) -> Plan:
        """The plan on the member's rung, or on the next lower one that fits at present."""
        left = self.allowed_bytes - outside_bytes
        for rung in range(member.rung, -1, -1):
            if peak_bytes(member.plan_at(rung)) <= left:
                return member.plan_at(rung)
        smallest = member.smallest_plan()
        if peak_bytes(smallest) > left:
            raise self._too_small(smallest, outside_bytes)
        return smallest

    def _end_step(self) -> None:
        sequence, self._sequence = self._sequence, []
        members = tuple(visit.member for visit in sequence)
        if sequence and members not in self._known:
            for member, rung in self._highest_rungs(sequence).items():
                member.learn(rung, is_followed=member in members[:-1])
            self._known.add(members)
        self._most_standing_bytes = 0
        self.plans = []

    def _highest_rungs(self, sequence: Sequence[Visit]) -> dict[Member, int]:
        """Where the graphs stand after as many steps up as fit, the most gainful first.

        All standing on their lowest, each has fitted when it ran. The steps are the same for every budget, so
        that a larger one means more of them.
        """
        steps = _steps_up(sequence)
        taken = bisect_left(range(1, len(steps) + 1), True, key=lambda n: not self._fits(sequence, steps[:n]))
        rungs = Counter(steps[:taken])
        return {visit.member: rungs[visit.member] for visit in sequence}

    def _fits(self, sequence: Sequence[Visit], steps: Sequence[Member]) -> bool:
        """Whether each graph is within the budget while it runs, with all that the others hold then."""
        rungs, kept, to_come = Counter(steps), 0, sum(visit.gradient_bytes for visit in sequence)
        for visit in sequence:
            plan = visit.member.plan_at(rungs[visit.member], is_followed=_is_followed(visit.member, sequence))
            to_come -= visit.gradient_bytes
            outside = self._most_standing_bytes - visit.own_bytes + kept - visit.handed_bytes + to_come
            if peak_bytes(plan) + outside > self.allowed_bytes:
                return False
            kept += kept_bytes(plan)
        return True

    def _too_small(self, smallest: Plan, outside_bytes: int) -> BudgetTooSmall:
        peak = int(np.argmax(smallest.projected_curve_bytes))
        binding = alive_at(smallest.graph, smallest.steps, peak)
        needed = peak_bytes(smallest) + outside_bytes
        return BudgetTooSmall(
            f"{format_bytes(self.allowed_bytes)} allowed for all graphs, of which others hold"
            f" {format_bytes(outside_bytes)} when this one runs, and it needs at least"
            f" {format_bytes(peak_bytes(smallest))}; it binds through {', '.join(binding[:4])}",
            allowed_bytes=self.allowed_bytes,
            minimum_bytes=needed,
            binding=binding,
        )


def _is_followed(member: Member, sequence: Sequence[Visit]) -> bool:
    return any(visit.member is member for visit in sequence[:-1])


def _steps_up(sequence: Sequence[Visit]) -> list[Member]:
    """All steps from a rung to the next by the graphs of a sequence, those that gain most first."""
    members = dict.fromkeys(visit.member for visit in sequence)
    gains = [(gain, m) for m in members for gain in m.gains(is_followed=_is_followed(m, sequence))]
    return [member for _, member in sorted(gains, key=lambda pair: -pair[0])]
