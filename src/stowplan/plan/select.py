"""Selection: the baseline graph and other candidates answer a budget, and the best answer is used.

The budget comes first, exactness second, time third. A plan without tiles gives eager's gradients bit for
bit, one with tiles gives them within rounding. Tiles are therefore used if nothing else is within the budget,
or, if the caller prefers time, if they are faster. The candidate with the smallest bound is examined next,
more closely each time, and only while it could still win. If the baseline graph has a plan within the budget,
no other candidate is examined.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf
from typing import Generic, TypeVar

from stowplan.errors import BudgetTooSmall, NotTileable
from stowplan.ir import Graph
from stowplan.plan.candidate import (
    GRAPH_CANDIDATES,
    Baseline,
    Candidate,
    GraphCandidate,
    Refusals,
    Tradeoff,
)
from stowplan.plan.options import PlanOptions, Prefer
from stowplan.plan.plan import Exactness, Plan
from stowplan.plan.planner import baseline_peak_of, refuse_without_ops
from stowplan.plan.pricing import Pricing
from stowplan.plan.watch import patience
from stowplan.units import format_bytes

C = TypeVar("C", bound=Candidate)
_ROUNDING = 1e-9  # of sums of seconds in another order


@dataclass(slots=True)
class Selector(Generic[C]):
    """Answers budgets from the baseline graph and, if that is not enough, from the tiled candidates."""

    plain: C
    baseline: Baseline
    find_candidates: Callable[[Refusals], Iterable[C]]
    prefer: Prefer = Prefer.EXACTNESS
    compare: Callable[[Plan], Plan] = lambda plan: plan  # with eager, where there is a model
    _candidates: tuple[C, ...] | None = field(default=None, repr=False)
    _refusals: Refusals = field(default_factory=Refusals, repr=False)

    def plan(self, allowed_bytes: int) -> Plan:
        """The best plan within `allowed_bytes`; raises BudgetTooSmall with the smallest that was found."""
        return self.compare(self.answer(allowed_bytes)[0])

    def answer(self, allowed_bytes: int) -> tuple[Plan, C]:
        """The best plan and the candidate it is for."""
        best = self._answered(self.plain, allowed_bytes)
        if best is not None and (self.prefer is Prefer.EXACTNESS or self._costs_nothing(best[0])):
            return best
        candidates = () if patience().over else self.candidates
        queue = [(0.0, number, each.bounds(allowed_bytes)) for number, each in enumerate(candidates)]
        while queue and (best is None or queue[0][0] < best[0].projected_seconds):
            if patience().over:
                break
            _, number, bounds = heappop(queue)
            closer = self._closer(self.candidates[number], bounds)
            if closer is None:
                best = _faster(best, self._answered(self.candidates[number], allowed_bytes))
            elif closer < inf:
                heappush(queue, (closer, number, bounds))
        if over := patience().over:
            return self._so_far(best, allowed_bytes, over)
        return best or self._by_the_smallest(allowed_bytes)

    def _so_far(self, best: tuple[Plan, C] | None, allowed_bytes: int, over: str) -> tuple[Plan, C]:
        """The best answer when the search was ended; without one, a refusal that says so."""
        if best is not None:
            return replace(best[0], cut_short=over), best[1]
        try:
            return self.plain.plan(allowed_bytes), self.plain
        except BudgetTooSmall as refusal:
            if over in refusal.what:
                raise
            raise refusal.with_untiled((f"not all, because the search was ended by {over}",)) from None

    def _costs_nothing(self, plan: Plan) -> bool:
        return plan.projected_seconds <= self.baseline.seconds * (1 + _ROUNDING)

    @property
    def candidates(self) -> tuple[C, ...]:
        """All tiled candidates."""
        if self._candidates is None:
            self._candidates = tuple(self.find_candidates(self._refusals))
        return self._candidates

    def tradeoffs(self) -> tuple[Tradeoff, ...]:
        """Budget against time over all candidates, from the smallest budget on."""
        exact = tuple(self.plain.tradeoffs())
        least = min(offer.peak_bytes for offer in exact)
        tiled = [offer for candidate in self.candidates for offer in self._offered(candidate)]
        if self.prefer is Prefer.EXACTNESS:
            return (*_undominated(offer for offer in tiled if offer.peak_bytes < least), *exact)
        return tuple(_undominated((*exact, *tiled)))

    @property
    def minimum_bytes(self) -> int:
        """The smallest budget for which a plan was found; searches wherever it could be."""
        try:
            self._by_the_smallest(0)
        except BudgetTooSmall as refusal:
            return refusal.minimum_bytes
        return 0

    def _by_the_smallest(self, allowed_bytes: int) -> tuple[Plan, C]:
        """The answer of a candidate that seemed to need more; else BudgetTooSmall with the smallest found.

        The floor of a candidate is an estimate: its ops may turn out to take less when they are probed.
        """
        floors = {
            number: floor
            for number, candidate in enumerate(self.candidates)
            if (floor := self._floor(candidate)) < inf
        }
        smallest: BudgetTooSmall | None = None
        candidates = (
            self.plain,
            *(self.candidates[number] for number in sorted(floors, key=floors.__getitem__)),
        )
        for candidate in candidates:
            if smallest is not None and candidate.floor_bytes >= smallest.minimum_bytes:
                break
            try:
                return candidate.plan(allowed_bytes), candidate
            except BudgetTooSmall as refusal:
                if smallest is None or refusal.minimum_bytes < smallest.minimum_bytes:
                    smallest = refusal
            except NotTileable as refusal:
                self._note(candidate, refusal)
        assert smallest is not None, "a step that refuses no budget"
        raise smallest.with_untiled((*self._refusals.sentences(), *self._needs_in_tiles(floors)))

    def _needs_in_tiles(self, floors: Mapping[int, float]) -> Iterator[str]:
        """By stretch what the step needs at least with it in tiles."""
        least: dict[str, float] = {}
        for number, floor in floors.items():
            for stretch in self.candidates[number].stretches:
                least[stretch] = min(floor, least.get(stretch, inf))
        for stretch, floor in least.items():
            yield f"{stretch}: in tiles the step still needs at least about {format_bytes(int(floor))}"

    def _closer(self, candidate: C, bounds: Iterator[float]) -> float | None:
        """None if there is no closer bound, infinite if it turns out to be no candidate at all."""
        try:
            return next(bounds, None)
        except NotTileable as refusal:
            self._note(candidate, refusal)
            return inf

    def _answered(self, candidate: C, allowed_bytes: int) -> tuple[Plan, C] | None:
        """A candidate's plan; None if it turns out to need more memory."""
        try:
            return (
                None if candidate.floor_bytes > allowed_bytes else (candidate.plan(allowed_bytes), candidate)
            )
        except BudgetTooSmall:
            return None
        except NotTileable as refusal:
            self._note(candidate, refusal)
            return None

    def _floor(self, candidate: C) -> float:
        try:
            return candidate.floor_bytes
        except NotTileable as refusal:
            self._note(candidate, refusal)
            return inf

    def _offered(self, candidate: C) -> tuple[Tradeoff, ...]:
        try:
            return tuple(candidate.tradeoffs())
        except NotTileable as refusal:
            self._note(candidate, refusal)
            return ()

    def _note(self, candidate: C, refusal: NotTileable) -> None:
        for stretch in candidate.stretches:
            self._refusals.add(stretch, refusal)


def _faster(one: tuple[Plan, C] | None, other: tuple[Plan, C] | None) -> tuple[Plan, C] | None:
    """Of two answers, or none; the first if they are as fast."""
    if one is None or other is None:
        return one or other
    return other if other[0].projected_seconds < one[0].projected_seconds else one


def _undominated(offers: Iterable[Tradeoff]) -> Iterator[Tradeoff]:
    """By ascending peak, those that no smaller one matches in time; of equals the more exact."""
    fastest = inf
    for offer in sorted(offers, key=lambda o: (o.peak_bytes, o.seconds, o.exactness is Exactness.ROUNDING)):
        if offer.seconds < fastest:
            fastest = offer.seconds
            yield offer


def planner_of(
    graph: Graph, pricing: Pricing, options: PlanOptions, *, plain_peak_bytes: int | None = None
) -> Selector[Candidate]:
    """Plans a graph that cannot run here; searches when a budget first asks for it.

    `plain_peak_bytes` is the option of `Planner.of`.
    """
    refuse_without_ops(graph)
    seconds = sum(pricing.seconds[op.id] for op in graph.ops)
    peak = baseline_peak_of(graph, pricing) if plain_peak_bytes is None else plain_peak_bytes
    baseline = Baseline(seconds, peak)
    plain: Candidate = GraphCandidate(graph, pricing, baseline, options)

    def find_candidates(refusals: Refusals) -> Iterator[Candidate]:
        for candidates in GRAPH_CANDIDATES.offered(options.allow):
            yield from candidates(graph, pricing, baseline, options, refusals)

    return Selector(plain, baseline, find_candidates, Prefer(options.prefer))
