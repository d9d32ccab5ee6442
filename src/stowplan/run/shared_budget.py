"""One budget for several graphs that run within one step, as graph breaks make them.

While a graph runs, what the others have in memory counts against it: their parameters and inputs, what those
before it keep for their backward, and the gradients of those after it, whose backward comes first.

The first time a sequence of graphs runs nobody knows what is still to come, so each takes the smallest plan
it has, unless it is a step of its own: a loss of which nothing was computed before. Once the step is over its
sequence is known, and from the next one on its graphs are planned together: from their smallest plans they go
up to faster ones, step by step where most seconds are gained per byte, as long as none is over the budget. A
graph that belongs to several sequences takes the smallest of the plans they leave it.
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
from stowplan.run.ladder import Ladder, Rung
from stowplan.run.living import LivingStorages
from stowplan.run.member import Member
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

    def rung_for(self, member: Member, inputs: Sequence[Tensor], wanted: Iterable[Tensor]) -> Rung:
        """What to run `member` by, now. `wanted` are the inputs whose gradients stay when it is done."""
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
        rung = self._fitting_rung(member, self._standing.nbytes - visit.own_bytes + kept)
        self._sequence.append(visit)
        self.plans.append(rung.plan)
        return rung

    def opened(self, rung: Rung, outputs: Iterable[Tensor]) -> object:
        """Note what a run keeps for its backward, its outputs included. Returns what `closed` is told."""
        run = object()
        self._kept_bytes[run] = rung.kept_bytes
        self._handed.add(outputs)
        return run

    def closed(self, run: object) -> None:
        """The run's backward is done, or will never come. May be told twice."""
        self._kept_bytes.pop(run, None)

    def _fitting_rung(self, member: Member, outside_bytes: int) -> Rung:
        """The rung the member may stand on, or the next lower one that fits at present."""
        left = self.allowed_bytes - outside_bytes
        for height in range(self._height(member, left), -1, -1):
            if member.rung(height).peak_bytes <= left:
                return member.rung(height)
        if member.smallest().peak_bytes > left:
            raise self._too_small(member.smallest(), outside_bytes)
        return member.smallest()

    def _height(self, member: Member, left: int) -> int:
        """How high it may stand. One that nothing precedes and nothing follows is a step of its own."""
        is_alone = not (member.is_known or member.is_followed or self._kept_bytes)
        return member.ladder(is_followed=False).height_within(left) if is_alone else member.height

    def _end_step(self) -> None:
        sequence, self._sequence = self._sequence, []
        members = tuple(visit.member for visit in sequence)
        if sequence and members not in self._known:
            for member, height in self._heights(sequence).items():
                member.learn(height, is_followed=member in members[:-1])
            self._known.add(members)
        self._most_standing_bytes = 0
        self.plans = []

    def _heights(self, sequence: Sequence[Visit]) -> dict[Member, int]:
        """Where the graphs stand after as many steps up as fit, the most gainful first.

        With none, each is on its lowest rung, and has fitted when it ran. The steps are the same for every
        budget, so that a larger one means more of them.
        """
        steps = _steps_up(sequence)
        taken = bisect_left(range(1, len(steps) + 1), True, key=lambda n: not self._fits(sequence, steps[:n]))
        heights = Counter(steps[:taken])
        return {visit.member: heights[visit.member] for visit in sequence}

    def _fits(self, sequence: Sequence[Visit], steps: Sequence[Member]) -> bool:
        """Whether each graph is within the budget while it runs, with all that the others hold then."""
        heights, kept, to_come = Counter(steps), 0, sum(visit.gradient_bytes for visit in sequence)
        for visit in sequence:
            rung = _ladder_in(sequence, visit.member).rung(heights[visit.member])
            to_come -= visit.gradient_bytes
            outside = self._most_standing_bytes - visit.own_bytes + kept - visit.handed_bytes + to_come
            if rung.peak_bytes + outside > self.allowed_bytes:
                return False
            kept += rung.kept_bytes
        return True

    def _too_small(self, smallest: Rung, outside_bytes: int) -> BudgetTooSmall:
        graph, steps, curve = smallest.plan.graph, smallest.plan.steps, smallest.plan.projected_curve_bytes
        binding = alive_at(graph, steps, int(np.argmax(curve)))
        named = (f"{name} ({format_bytes(graph.tensors[name].nbytes or 0)})" for name in binding[:4])
        return BudgetTooSmall(
            f"{format_bytes(self.allowed_bytes)} allowed for all graphs of the step; other graphs hold"
            f" {format_bytes(outside_bytes)} when this one runs, which needs at least"
            f" {format_bytes(smallest.peak_bytes)}; it binds through {', '.join(named)}",
            allowed_bytes=self.allowed_bytes,
            minimum_bytes=smallest.peak_bytes + outside_bytes,
            binding=binding,
        )


def _ladder_in(sequence: Sequence[Visit], member: Member) -> Ladder:
    return member.ladder(is_followed=any(visit.member is member for visit in sequence[:-1]))


def _steps_up(sequence: Sequence[Visit]) -> list[Member]:
    """All steps from a rung to the next by the graphs of a sequence, those that gain most first."""
    members = dict.fromkeys(visit.member for visit in sequence)
    steps = [(gain, member) for member in members for gain in _ladder_in(sequence, member).gains]
    return [member for _, member in sorted(steps, key=lambda step: -step[0])]
