"""Why every tensor of a plan was decided so, a sentence each: what it takes, costs and spares.

`explain` tells all about one tensor; this tells the same in short of all of them, in one pass.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stowplan.analyse.timeline import Doing, Stay, Timeline
from stowplan.ir import Phase
from stowplan.plan.plan import Plan
from stowplan.plan.steps import Decision, Keep, Offload, Recompute, Tile
from stowplan.units import format_bytes, format_share


def decisions_of(plan: Plan, timeline: Timeline) -> dict[str, Decision]:
    """The plan's decisions, and Keep for tensors that stay only because others are recomputed from them."""
    again = {at for at, run in enumerate(timeline.runs) if run.doing is Doing.RECOMPUTE}
    forward = {name for op in plan.graph.ops if op.phase is Phase.FORWARD for name in op.writes()}
    sources = (stay.tensor for stay in timeline.stays if not stay.copy and again.intersection(stay.uses))
    return {name: Keep() for name in sources if name in forward} | dict(plan.decisions)


def reasons_of(plan: Plan, timeline: Timeline) -> dict[str, str]:
    """A sentence for every tensor that something was decided about."""
    stays: dict[str, list[Stay]] = {}
    for stay in timeline.stays:
        stays.setdefault(stay.tensor, []).append(stay)
    whole = plan.plain_seconds or 1.0
    price = {name: plan.pricing.seconds[op.id] / whole for op in plan.graph.ops for name in op.writes()}
    judge = _Judge(plan.allowed_bytes, timeline.curve_bytes())
    return {
        owner: judge.reason(decision, stays.get(owner, []), price.get(owner, 0.0))
        for owner, decision in decisions_of(plan, timeline).items()
    }


@dataclass(frozen=True, slots=True)
class _Judge:
    """Knows the budget and the curve, and so what another decision would have come to."""

    allowed_bytes: int
    curve: NDArray[np.int64]

    def reason(self, decision: Decision, stays: list[Stay], price: float) -> str:
        """The sentence for one tensor, whose maker takes `price` of the baseline."""
        match decision:
            case Keep():
                return self._kept(stays, price)
            case Recompute(hold):
                return self._recomputed(stays, price, hold=hold)
            case Offload(tier):
                return self._moved(stays, tier)
            case Tile(segment, parts):
                return f"never whole: segment {segment} is computed in {'x'.join(map(str, parts))} tiles"

    def _kept(self, stays: list[Stay], price: float) -> str:
        if not stays:
            return "kept where it is: it takes no memory of its own"
        stay = stays[0]
        takes = f"takes {format_bytes(stay.nbytes)} for {stay.last - stay.first + 1} runs"
        at_peak = stay.first <= int(self.curve.argmax()) <= stay.last
        use = "and lower the memory at the peak" if at_peak else "and not lower the peak"
        return f"{takes}; recomputing it would cost {format_share(price)} of the baseline or more {use}"

    def _recomputed(self, stays: list[Stay], price: float, *, hold: bool) -> str:
        again = stays[1:]
        if not again:
            return "freed after its last forward reader"
        times = "once" if len(again) == 1 else f"{len(again)} times"
        manner = " and held to its last reader" if hold else ""
        cost = f"recomputed {times}{manner}, {format_share(price)} of the baseline each time"
        return f"{cost}; {self._if_kept(stays[0], again[-1])}"

    def _moved(self, stays: list[Stay], tier: str) -> str:
        offloaded = f"offloaded to {tier} while no op reads it, and loaded back before its next reader"
        return f"{offloaded}; {self._if_kept(stays[0], stays[-1])}" if len(stays) > 1 else offloaded

    def _if_kept(self, first: Stay, last: Stay) -> str:
        """The peak of the step if the tensor stayed in memory meanwhile, as words."""
        waiting = int(self.curve[first.last + 1 : last.first].max(initial=0)) + first.nbytes
        over = waiting - self.allowed_bytes
        reach = f"if it were kept, the step would reach {format_bytes(waiting)}"
        return f"{reach}, {format_bytes(over)} over the budget" if over > 0 else f"{reach}, which fits"
