"""Early gathers: messages that bring whole parameters begin before the ops that run ahead of their reader.

A gather is two ops. The first allocates a buffer and begins the messages; the second waits for them and makes
the parameters, views of the buffer, which alone are read. A plan has them side by side. Here the first moves
up, to just after the wait of an earlier gather, so that messages travel while the ops in between compute:

    wait g-1; begin g; ops that read g-1; wait g; ops that read g

With the memory curve m, the bytes B of the buffer and the budget M, moving the first from step b up to step a
makes m[i] + B of m[i] for a <= i < b, so it must be that m[i] + B <= M there. A gather begins as many gathers
ahead as its messages need to travel beside computation, at most `MOST_AHEAD`, and as the budget allows.

Gathers begin in the order of their waits, in the half of the step that waits for them. Workers that run one
plan therefore exchange all messages in one order, as many as before. Workers that have plans of their own
begin a gather in its turn: it reads the token of the collective before it, and moves up to there at most.
Each of them may move it as far as its own budget allows, for the order of all messages stays the same.
"""

from dataclasses import replace

from stowplan.ir import Op, Phase
from stowplan.ops.effects import BEGIN_GATHER, BEGIN_IN_ORDER, END_GATHER
from stowplan.plan.draft import Draft
from stowplan.plan.judge.simulate import simulate
from stowplan.plan.steps import Compute, RecomputeOp, Step

MOST_AHEAD = 4
"""Of how many earlier gathers the readers may run while one travels."""


def with_early_gathers(draft: Draft, allowed_bytes: int) -> Draft:
    """The draft with gathers that begin early, where its steps then fit into `allowed_bytes`."""
    moving = _Moving(draft, allowed_bytes)
    for number, step in enumerate(draft.steps):  # what moves stays before this step
        op = moving.op_of(step)
        if op is not None and op.type in (BEGIN_GATHER, BEGIN_IN_ORDER):
            moving.begin_early(number, op)
    steps = tuple(moving.steps)
    if steps == draft.steps:
        return draft
    curve = simulate(draft.graph, steps, draft.pricing).curve_bytes
    return replace(draft, steps=steps, projected_curve_bytes=curve)


class _Moving:
    """The steps of a plan, and the bytes alive while each runs, while gathers move up one by one."""

    def __init__(self, draft: Draft, allowed_bytes: int) -> None:
        self._graph, self._pricing, self._allowed_bytes = draft.graph, draft.pricing, allowed_bytes
        self._ops = {op.id: op for op in draft.graph.ops}
        self.steps, self._curve = list(draft.steps), list(draft.projected_curve_bytes)
        forward = [n for n, step in enumerate(self.steps) if self._is_in(Phase.FORWARD, step)]
        self._turn = forward[-1] + 1 if forward else 0  # backward begins here, with what it recomputes

    def op_of(self, step: Step) -> Op | None:
        """The op that a step runs."""
        return self._ops[step.op] if isinstance(step, Compute | RecomputeOp) else None

    def _is_in(self, phase: Phase, step: Step) -> bool:
        return isinstance(step, Compute) and self._ops[step.op].phase is phase

    def begin_early(self, number: int, gather: Op) -> None:
        """Move this step, which begins a gather, to where it should be."""
        nbytes = self._graph.tensors[gather.outputs[0].tensor].nbytes or 0
        place = self._place_for(number, gather, nbytes)
        if place < number:
            begun_bytes = self._curve[place - 1] + nbytes + self._workspace(gather)
            self._curve[place:number] = [level + nbytes for level in self._curve[place:number]]
            self._curve.insert(place, begun_bytes)
            del self._curve[number + 1]
            self.steps.insert(place, self.steps.pop(number))

    def _place_for(self, number: int, gather: Op, nbytes: int) -> int:
        """The step that the gather should begin before."""
        own = {self._graph.storage_of(name) for name in (*gather.reads(), *gather.writes())}
        place, ahead, hidden_seconds = number, 0, 0.0
        for at in range(number - 1, self._turn - 1 if number >= self._turn else 0, -1):
            op = self.op_of(self.steps[at])
            room = self._allowed_bytes - self._curve[at] - nbytes
            if room < 0 or ahead == MOST_AHEAD:
                break
            if self._touches(self.steps[at], own):
                is_turn = (
                    op is not None
                    and gather.type == BEGIN_IN_ORDER
                    and gather.inputs[-1].tensor in op.writes()
                )
                return at + 1 if is_turn and room >= self._workspace(gather) else place
            if op is None:
                continue
            is_begun_alone = op.type == BEGIN_GATHER and not self._waits(at + 1)
            if (self._waits(at) or is_begun_alone) and room >= self._workspace(gather):
                place, ahead = at + 1, ahead + 1
                if hidden_seconds >= self._pricing.seconds[gather.id]:
                    break
            if op.type == BEGIN_GATHER:  # in the order of their waits
                break
            hidden_seconds += self._pricing.seconds[op.id]
        return place

    def _waits(self, number: int) -> bool:
        op = self.op_of(self.steps[number])
        return op is not None and op.type == END_GATHER

    def _touches(self, step: Step, storages: set[str]) -> bool:
        """Whether a step uses or frees one of these storages."""
        if isinstance(step, Compute | RecomputeOp):
            names = (*self._ops[step.op].reads(), *self._ops[step.op].writes())
        else:
            names = step.tensors
        return not storages.isdisjoint(map(self._graph.storage_of, names))

    def _workspace(self, op: Op) -> int:
        return self._pricing.workspace_bytes.get(op.id, 0)
