"""One budget for several graphs that run within one step, as graph breaks make them.

The first time a sequence of graphs runs nobody knows what is still to come, so each takes the smallest plan
it has, unless it is a step of its own: a loss of which nothing was computed before. Once the step is over its
sequence is known, and from the next one on its graphs are planned together: from their smallest plans they go
up to faster ones, step by step where most seconds are gained per byte, as long as none is over the budget. A
graph that belongs to several sequences takes the smallest of the plans they leave it.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from torch import Tensor

from stowplan.errors import BudgetTooSmall
from stowplan.plan.judge.simulate import alive_at
from stowplan.plan.plan import Plan
from stowplan.run.backend.account import Account
from stowplan.run.backend.ladder import Ladder, Rung
from stowplan.run.backend.member import Member
from stowplan.run.backend.visit import Run, Visit, most_bytes
from stowplan.units import format_bytes


class SharedBudget:
    """Hands out plans for one graph after another."""

    def __init__(self, allowed_bytes: int) -> None:
        self.allowed_bytes = allowed_bytes
        self._account = Account()
        self._known: set[tuple[Member, ...]] = set()

    @property
    def plans(self) -> Sequence[Plan]:
        """Of the step that is under way, or was last."""
        return self._account.plans

    def begin(self, member: Member, inputs: Sequence[Tensor], wanted: Iterable[Tensor]) -> Run:
        """What to run `member` by, now. `wanted` are the inputs whose gradients stay when it is done."""
        if not self._account.waiting:
            self._learn_from(self._account)
            self._account = Account()
        return self._fitting_run(self._account.visit(member, inputs, wanted))

    def opened(self, run: Run, results: Iterable[Tensor]) -> Account:
        """The run's forward is done. Returns the account that is to be told when its backward is."""
        self._account.opened(run, results)
        return self._account

    def _learn_from(self, step: Account) -> None:
        members = tuple(visit.member for visit in step.sequence)
        if members and members not in self._known:
            for member, height in self._heights(step).items():
                member.learn(height, is_followed=member in members[:-1])
            self._known.add(members)

    def _fitting_run(self, visit: Visit) -> Run:
        """By the rung that the graph may stand on, or the next lower one that fits at present."""
        for rung in self._rungs_down(visit):
            run = Run(visit, rung)
            if max(self._account.needed_bytes(run)) <= self.allowed_bytes:
                return run
        raise self._too_small(run)

    def _rungs_down(self, visit: Visit) -> Iterator[Rung]:
        for height in range(self._height(visit), -1, -1):
            yield visit.member.rung(height)
        yield visit.member.smallest()

    def _height(self, visit: Visit) -> int:
        """How high it may stand. One that nothing precedes and nothing follows is a step of its own."""
        member = visit.member
        if member.is_known or member.is_followed or self._account.waiting:
            return member.height
        return member.ladder(is_followed=False).height_within(
            self._account.room_bytes(visit, self.allowed_bytes)
        )

    def _heights(self, step: Account) -> dict[Member, int]:
        """Where the graphs stand after as many steps up as fit, the most gainful first.

        The steps are the same for every budget, so that a larger one means more of them.
        """
        steps = _steps_up(step.sequence)
        counts = range(1, len(steps) + 1)
        taken = bisect_left(counts, True, key=lambda n: not self._fits(step, Counter(steps[:n])))
        heights = Counter(steps[:taken])
        return {visit.member: heights[visit.member] for visit in step.sequence}

    def _fits(self, step: Account, heights: Counter[Member]) -> bool:
        """Whether each graph is within the budget while it runs, with all that the others hold then."""
        runs = [
            Run(visit, _ladder_in(step.sequence, visit.member).rung(heights[visit.member]))
            for visit in step.sequence
        ]
        return max(most_bytes(runs, step.standing_bytes)) <= self.allowed_bytes

    def _too_small(self, newcomer: Run) -> BudgetTooSmall:
        needed = self._account.needed_bytes(newcomer)
        run = [*self._account.waiting, newcomer][int(np.argmax(needed))]
        plan, own = run.rung.plan, run.rung.peak_bytes
        binding = alive_at(plan.graph, plan.steps, int(np.argmax(plan.projected_curve_bytes)))
        named = (f"{name} ({format_bytes(plan.graph.tensors[name].nbytes or 0)})" for name in binding[:4])
        return BudgetTooSmall(
            f"{format_bytes(self.allowed_bytes)} allowed for all graphs of the step, but at least"
            f" {format_bytes(max(needed))} ({max(needed)} bytes) needed: {format_bytes(own)} by a graph that"
            f" binds through {', '.join(named)}; {format_bytes(max(needed) - own)} are held by others then",
            allowed_bytes=self.allowed_bytes,
            minimum_bytes=max(needed),
            binding=binding,
        )


def _ladder_in(sequence: Sequence[Visit], member: Member) -> Ladder:
    return member.ladder(is_followed=any(visit.member is member for visit in sequence[:-1]))


def _steps_up(sequence: Sequence[Visit]) -> list[Member]:
    """All steps from a rung to the next by the graphs of a sequence, those that gain most first."""
    members = dict.fromkeys(visit.member for visit in sequence)
    steps = [(gain, member) for member in members for gain in _ladder_in(sequence, member).gains]
    return [member for _, member in sorted(steps, key=lambda step: -step[0])]
